#!/bin/sh
# A part of `make gpu` or `make gpu-verify`: gpu.sh PART, with OUT, LIMIT and PYTHON as in the
# Makefile. Nothing is installed. What it finds is left in OUT as it finds it, what it says in
# OUT/gpu.log; all that it calls shares LIMIT seconds. Exits with 64 where no part could run.

part=$1 run=gpu status=0
case $part in gpu-verify-*) run=verify-gpu ;; esac

refuse() {
  echo "Error: $*" >&2
  exit 64
}
case $LIMIT in '' | 0 | *[!0-9]*) refuse "LIMIT=$LIMIT: expected seconds, such as LIMIT=270" ;; esac
[ -n "$OUT" ] || refuse "OUT is empty; use a folder, such as OUT=results/gpu"
command -v "$PYTHON" > /dev/null || refuse "PYTHON=$PYTHON does not exist; use a Python with torch"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
output=$("$PYTHON" -m attnbench --version 2>&1) || refuse "${output#Error: }"
mkdir -p "$OUT" 2> /dev/null && touch "$OUT/gpu.log" 2> /dev/null ||
  refuse "OUT=$OUT: cannot write to such a folder; use another one"

begin=$(date +%s) before=$(wc -l < "$OUT/gpu.log")
exec 2>> "$OUT/gpu.log"
echo "== $part" >&2

python() {
  left=$((begin + LIMIT - $(date +%s)))
  [ $left -gt 0 ] || return 124
  timeout --foreground -k 10 $left "$PYTHON" "$@" # in the foreground an interrupt ends it, too
}
attnbench() { python -m attnbench "$@"; }
also() { [ "$1" -le $status ] || status=$1; }

# Of each implementation in each dtype a line in check.txt: those that are done are left out.
check() {
  names=$(attnbench list --json | "$PYTHON" -c '
import json, sys
tables = (p.get("table", ()) for s in json.load(sys.stdin)["sections"] for p in s["parts"])
print(*(row["name"] for table in tables for row in table if "family" in row))')
  [ -n "$names" ] || also 1
  for dtype in bfloat16 float16 float32; do
    for name in $names; do
      if ! grep -q "^$dtype $name: exit" "$OUT/check.txt"; then # a line a check, if it is cut off
        attnbench check --device cuda --dtypes $dtype --impls "$name" --verbose >> "$OUT/check.txt"
        code=$?
        [ $code -le 1 ] && echo "$dtype $name: exit $code" >> "$OUT/check.txt"
        also $code
      fi
      grep -q "^$dtype $name: exit 0" "$OUT/check.txt" || also 1
    done
  done
}

case $part in
  gpu-doctor)
    attnbench doctor --device cuda --json > "$OUT/doctor.json"
    also $?
    grep -m1 '"verdict"' "$OUT/doctor.json" >&2 || rm "$OUT/doctor.json" # cut off, it is not JSON
    ;;
  gpu-test) # without a GPU they would all be skipped
    attnbench list --device cuda > /dev/null &&
      python -m pytest -o addopts= -q -m gpu tests/test_gpu.py tests/test_gate_gpu.py >&2
    also $?
    ;;
  gpu-sweep | gpu-verify-sweep)
    if [ -e "$OUT/$run/run.json" ]; then
      set -- --resume $run
    else # a cell that hangs does so twice, under the profiler and where it is timed
      rmdir "$OUT/$run" 2> /dev/null
      set -- --preset $run --device cuda --timeout 100 --name $run
    fi
    attnbench sweep "$@" --output "$OUT" >&2
    also $?
    ;;
  gpu-report | gpu-verify-report)
    attnbench report $run --output "$OUT" >&2 &&
      tar -C "$OUT/$run" -czf "$OUT/$run/plots.tar.gz" plots && rm -r "$OUT/$run/plots"
    also $?
    ;;
  gpu-verdicts)
    attnbench claims verify-gpu --output "$OUT" > "$OUT/claims.txt"
    also $?
    attnbench verify verify-gpu --output "$OUT" > "$OUT/verify.txt"
    also $?
    ;;
  gpu-check)
    touch "$OUT/check.txt"
    check
    ;;
  *) echo "no part $part" >&2 && also 64 ;;
esac
case $status in
  124) echo "cut off after LIMIT=$LIMIT seconds: call make $part again, or with a larger LIMIT" >&2 ;;
  137) echo "killed, after LIMIT=$LIMIT seconds or for want of memory" >&2 ;;
esac
tail -n +$((before + 1)) "$OUT/gpu.log" | tail -n 8
echo "$part: exit $status"
exit $status
