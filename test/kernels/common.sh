# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
#
# What run and fetch share.

me=kernels
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
cache=${KERNELS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ip-masq-agent/kernels}
readonly me here cache

# shellcheck source=../common.sh
. "$here/../common.sh"

# pack DIR prints DIR as an initramfs, uncompressed, because a guest boots
# faster from that.
pack() { (cd "$1" && find . -mindepth 1 | cpio -o -H newc --quiet); }
