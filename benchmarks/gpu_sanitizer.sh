#!/usr/bin/env bash
# A part of tests/gpu under compute-sanitizer (memcheck, then racecheck), after benchmarks/gpu_session.sh has built in
# place: two minutes, result in OUT/sanitizer.json and as the last lines.
#
#   benchmarks/gpu_sanitizer.sh OUT
#
# All tensors of a test lie in one allocation, so memcheck finds accesses outside that and misaligned ones; writes
# between tensors are found by the guards of tests/ops/harness.py. racecheck looks at shared memory.
set -u
OUT=${1:?folder for the results}
mkdir -p "$OUT"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD:/tmp/surogate-site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
SANITIZER=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$SANITIZER" ] || { echo "compute-sanitizer is not installed: nothing was checked" >&2; exit 2; }

# One of every kernel with barriers or exchanges between lanes, in both of its forms; products and attention of
# NVIDIA's libraries are theirs to check, our kernels around them are in.
CHOICE="test_bf16 and (rmsnorm or qk_norm or sum_rows or embedding_backward or swiglu or rope or dropout)
 or test_norms_of_rows_of_every_width and (64-bf16 or 1024-bf16 or 8200-bf16 or 33-f32)
 or test_sums_of_rows or test_losses and (f32 or bf16) or test_packed_attention and 257
 or test_adamw_rounds and 2051 or test_fill_and_copy or test_graphs_and_eager and selective"

run() {
    local tool=$1 begin=$SECONDS
    timeout 75 "$SANITIZER" --tool "$tool" --error-exitcode 9 --target-processes all --log-file "$OUT/$tool.log" \
        python3 -m pytest tests/gpu -q -x -p no:cacheprovider --junitxml="$OUT/$tool.xml" \
        -k "$(tr '\n' ' ' <<<"$CHOICE")" >"$OUT/$tool-tests.log" 2>&1
    echo "$? $((SECONDS - begin))" >"$OUT/$tool.rc"
}
run memcheck
run racecheck

python3 - "$OUT" <<'PY'
import json, re, subprocess, sys, xml.etree.ElementTree as xml
from pathlib import Path

out, found = Path(sys.argv[1]), {}
ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
gpu = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
for tool in ("memcheck", "racecheck"):
    rc, seconds = map(int, (out / f"{tool}.rc").read_text().split())
    log = (out / f"{tool}.log").read_text() if (out / f"{tool}.log").exists() else ""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", log)
    cases = list(xml.parse(out / f"{tool}.xml").iter("testcase")) if (out / f"{tool}.xml").exists() else []
    outcomes = [next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed") for case in cases]
    # 124: cut off by the time limit. Then nothing is said of the tests that did not run.
    found[tool] = {"exit": rc, "cut_off": rc == 124, "seconds": seconds, "summary": summary,
                   "tests": {o: outcomes.count(o) for o in sorted(set(outcomes))}}
(out / "sanitizer.json").write_text(json.dumps({"gpu": gpu, **found}, indent=1) + "\n")
print(json.dumps({"gpu": gpu, **found}, indent=1))
sys.exit(any(f["exit"] != 0 or not f["tests"].get("passed") for f in found.values()))
PY
