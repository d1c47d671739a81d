# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
#
# What the scripts of this directory share.

me=kubernetes
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
cache=${KUBERNETES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ip-masq-agent/kubernetes}
readonly me here cache

# shellcheck source=../common.sh
. "$here/../common.sh"
