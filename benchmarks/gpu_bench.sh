#!/usr/bin/env bash
# Training steps of published shapes on one GPU, after benchmarks/gpu_session.sh has built in place: JSON into OUT.
#   benchmarks/gpu_bench.sh OUT "qwen3-0.6b --batch 2 --accumulation 4" "qwen3-8b ..." ...
set -u
OUT=${1:?folder for the results}; shift
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD:/tmp/surogate-site PYTHONUNBUFFERED=1
for CASE in "$@"; do
    NAME=$(tr -c 'a-z0-9.\n' '-' <<<"$CASE" | tr -s '-')
    # shellcheck disable=SC2086
    timeout 170 python3 -m surogate bench $CASE --device cuda --json "$OUT/bench-$NAME.json" 2>&1 | tail -22
done
