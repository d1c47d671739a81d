# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
#
# What the scripts of this directory share.

set -euo pipefail
shopt -s nullglob

export PATH=$PATH:/usr/sbin:/sbin:/usr/local/go/bin
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
cache=${KUBERNETES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ip-masq-agent/kubernetes}
readonly here cache

say() { echo "kubernetes: $*" >&2; }
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
	apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null </dev/null
}
