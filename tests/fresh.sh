#!/usr/bin/env bash
# tests/fresh.sh [--isa avx2|sse4] [--cpus LIST] [--elsewhere] [--here] COMMAND…
#
# Runs COMMAND as on a machine where nobody has run before: in a new clone of HEAD (what is not
# committed is not in it), with a home, a /tmp, /var/tmp and /dev/shm and a list of processes of its
# own, and of the environment no more than finds programs and packages. All of it is gone at the end.
#
#   tests/fresh.sh make test
#   tests/fresh.sh --isa avx2 make test   torch, oneDNN and MKL use no wider instructions
#   tests/fresh.sh --cpus 0 make test     on these cores, as `taskset -c` takes them
#   tests/fresh.sh env LC_ALL=tr_TR.UTF-8 make test
#
# --here stays in this checkout and this environment: for a second run where the first installed.
# --elsewhere has a far time zone, the locale C, no home, and files that only their owner reads. It is
# for such a second run, too, as without a home pip has no settings and no cache.
#
# Namespaces keep it apart: those of root, or else of a user. Where neither are to be had, variables
# do for home and temporary files; it says what it has.
set -euo pipefail

fail() { echo "fresh: $*" >&2; exit 2; }

isa="" cpus="" elsewhere="" here=""
while [ $# -gt 0 ]; do
  case $1 in
    --isa|--cpus) [ $# -gt 1 ] || fail "$1 needs a value"; declare "${1#--}=$2"; shift 2 ;;
    --elsewhere|--here) declare "${1#--}=yes"; shift ;;
    -h|--help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    -*) fail "there is no option $1; there are --isa, --cpus, --elsewhere and --here" ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || fail "no command to run, such as: tests/fresh.sh make test"

variables=()
case $isa in
  "") ;;
  avx2) variables=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2) ;;
  sse4) variables=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2) ;;
  *) fail "--isa is avx2 or sse4, not $isa" ;;
esac
[ -z "$cpus" ] || set -- taskset -c "$cpus" "$@"
if [ -n "$elsewhere" ]; then
  umask 077
  set -- env TZ=Pacific/Auckland LC_ALL=C HOME=/dev/null/none "$@"
fi
[ -z "$here" ] || exec env "${variables[@]}" "$@"

while IFS= read -r -d "" setting; do
  case ${setting%%=*} in
    PATH|LD_LIBRARY_PATH|PYENV_*|CI|PIP_*|*CERT*|*CA_BUNDLE*|[Hh][Tt][Tt][Pp]*_[Pp][Rr][Oo][Xx][Yy]|[Nn][Oo]_[Pp][Rr][Oo][Xx][Yy])
      variables+=("$setting") ;;
  esac
done < <(env -0)
variables+=(LANG=C.UTF-8 TERM=dumb)

source=$(git rev-parse --show-toplevel)
place=$(mktemp -d /var/tmp/fresh.XXXXXX)
trap 'chmod -R u+rwX "$place"; rm -rf "$place"' EXIT
mkdir -p "$place/tmp/home" "$place/var"
chmod 1777 "$place/tmp" "$place/var"
git clone --quiet "$source" "$place/tmp/attnbench"
git -C "$place/tmp/attnbench" remote set-head origin --delete  # what is checked out is no default branch
for file in .pip/pip.conf .config/pip/pip.conf; do  # where packages are
  [ ! -f "${HOME:-}/$file" ] || install -D -m 600 "$HOME/$file" "$place/tmp/home/$file"
done

# /var/tmp comes last, for what is mounted lies in it. No exec: bash waits for orphans as an init does.
# A user who was root to mount is himself again.
# shellcheck disable=SC2016
mounted='
  set -e
  mount -t tmpfs tmpfs /dev/shm
  mount --bind "$0/tmp" /tmp
  mount --bind "$0/var" /var/tmp
  cd /tmp/attnbench
  "$@"
  exit'
new=(unshare --mount --pid --fork --kill-child --mount-proc)
for of in root user; do
  again=()
  if [ $of = user ]; then
    new+=(--map-root-user)
    again=(unshare "--map-user=$(id -u)" "--map-group=$(id -g)")
  fi
  if "${new[@]}" bash -c "$mounted" "$place" "${again[@]}" true 2> /dev/null; then
    echo "fresh: a home, temporary folders and processes of its own (namespaces of $of)" >&2
    "${new[@]}" bash -c "$mounted" "$place" "${again[@]}" env -i "${variables[@]}" HOME=/tmp/home "$@"
    exit
  fi
done
echo "fresh: no namespaces here: a home and TMPDIR of its own, but the /tmp of this machine" >&2
cd "$place/tmp/attnbench"
env -i "${variables[@]}" HOME="$place/tmp/home" TMPDIR="$place/var" "$@"
