# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What the scripts below this directory share. They say who they are in $me.

set -euo pipefail
shopt -s nullglob

export PATH=$PATH:/usr/sbin:/sbin:/usr/local/go/bin

say() { echo "${me:?}: $*" >&2; }
die() { say "$*"; exit 1; }

# install_missing PROGRAM=PACKAGE... installs the packages whose program the
# machine lacks.
install_missing() {
	local pair missing=()
	for pair in "$@"; do
		command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
	done
	((${#missing[@]})) || return 0
	((EUID == 0)) || die "please install (or run as root): ${missing[*]}"
	say "installing ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt-get -qq update >/dev/null
	apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}" >/dev/null </dev/null
}
