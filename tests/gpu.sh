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

# What does not compile and runs on a GPU, by name.
eager() {
  attnbench list --json | "$PYTHON" -c '
import json, sys
tables = (p.get("table", ()) for s in json.load(sys.stdin)["sections"] for p in s["parts"])
rows = (row for table in tables for row in table if "family" in row)
print(*(r["name"] for r in rows if "cuda" in r["devices"] and not r["compiles"]), sep=",")'
}

# SDPA 20 times against SDPA 20 or 21 times; ends with 0 if the verdict is the right one.
gate() {
  sed "s/^TIMES = 20/TIMES = $1/" tests/repeated.py > "$OUT/repeated-$1.py"
  [ -e "$OUT/gate-$1/gate.json" ] || rm -rf "$OUT/gate-$1"
  [ -e "$OUT/gate-$1" ] || attnbench gate --device cuda --impl "$OUT/repeated-$1.py" \
    --against tests/repeated.py --seq-lens 4096 --heads 16 --head-dims 128 --dtypes bfloat16 \
    --masks causal --budget $((LIMIT / 3))s --output "$OUT" --name "gate-$1" >&2
  attnbench gate --replay "$OUT/gate-$1/gate.json" --json > "$OUT/gate-$1.json"
  [ $? -eq "$2" ]
}

case $part in
  gpu-doctor)
    attnbench doctor --device cuda --json > "$OUT/doctor.json"
    also $?
    grep -m1 '"verdict"' "$OUT/doctor.json" >&2 || rm "$OUT/doctor.json" # cut off, it is not JSON
    ;;
  gpu-probe)
    python -W ignore tests/gpu_probe.py > "$OUT/probe.txt"
    also $?
    ;;
  gpu-test) # without a GPU they would all be skipped
    attnbench list --device cuda > /dev/null &&
      python -m pytest -o addopts= -q -m gpu tests/test_gpu.py tests/test_gate_gpu.py >&2
    also $?
    ;;
  gpu-check) # a line a check as it ends; at the end the whole result
    names=$(eager)
    [ -n "$names" ] && attnbench check --device cuda --dtypes bfloat16,float16,float32 --verbose \
      --impls "$names" --budget $((LIMIT * 4 / 5))s --json > "$OUT/check.json" 2> "$OUT/check.txt"
    also $?
    [ -s "$OUT/check.json" ] || rm -f "$OUT/check.json" # cut off, it is not JSON
    ;;
  gpu-gate)
    gate 20 0 || also 1
    gate 21 1 || also 1
    ;;
  gpu-advise)
    if [ -e "$OUT/advise/run.json" ]; then
      set -- advise
    else
      set -- --device cuda --budget $((LIMIT * 2 / 5))s --name advise \
        --case seq_len=4096,heads=16,head_dim=128,dtype=bfloat16,mask=causal \
        --case seq_len=4096,heads=16,kv_heads=4,head_dim=128,dtype=bfloat16,mask=causal,pass=both
    fi
    attnbench advise "$@" --json --output "$OUT" > "$OUT/advise.json"
    also $?
    ;;
  gpu-decode) # the cells of results/decode-h200
    if [ -e "$OUT/decode/run.json" ]; then
      set -- --resume decode
    else
      set -- --workload decode --impls sdpa,naive --caches concat,static --device cuda --heads 16 \
        --seq-lens 2048,8192,32768,131072 --kv-heads 4 --head-dims 128 --dtypes bfloat16 \
        --masks causal --new-tokens 4 --name decode
    fi
    attnbench sweep "$@" --output "$OUT" >&2
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
  *) echo "no part $part" >&2 && also 64 ;;
esac
case $status in
  124) echo "cut off after LIMIT=$LIMIT seconds: call make $part again, or with a larger LIMIT" >&2 ;;
  137) echo "killed, after LIMIT=$LIMIT seconds or for want of memory" >&2 ;;
esac
tail -n +$((before + 1)) "$OUT/gpu.log" | tail -n 8
echo "$part: exit $status"
exit $status
