#!/usr/bin/env bash
# Everything for a short lease of a GPU machine without network: build extension and plugin in place, run tests/gpu and
# benchmarks/gpu_kernels.py, write JSON, print a short table last.
#
#   benchmarks/gpu_session.sh OUT [pytest arguments]
#
# OUT: folder for session.json, kernels.json and the logs. Python packages that the machine lacks are taken from wheels
# in .whl, headers that it lacks from .cuda-headers (laid out as site-packages), where these folders exist.
set -u
OUT=${1:?folder for the results}; shift
mkdir -p "$OUT"
cd "$(dirname "$0")/.." || exit 1
BEGIN=$SECONDS
SITE=/tmp/surogate-site BUILD=build/gpu CACHE=$OUT/algorithms
mkdir -p "$CACHE"

if compgen -G '.whl/*.whl' >/dev/null && [ ! -d "$SITE" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" .whl/*.whl || exit 1
fi
export PYTHONPATH=$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

set -o pipefail
cmake -S . -B "$BUILD" -G Ninja -DPython_EXECUTABLE="$(command -v python3)" \
    -Dnanobind_ROOT="$(python3 -m nanobind --cmake_dir)" \
    -DSUROGATE_WERROR=OFF -DSUROGATE_CUDA=ON -DSUROGATE_CUDA_PATH="$PWD/.cuda-headers" -DSUROGATE_CUDA_TARGETS="${TARGETS:-90a}" \
    >"$OUT/build.log" 2>&1 &&
    cmake --build "$BUILD" >>"$OUT/build.log" 2>&1 &&
    cmake --install "$BUILD" --prefix "$PWD" >>"$OUT/build.log" 2>&1 ||
    { tail -40 "$OUT/build.log"; echo "BUILD FAILED"; exit 1; }
BUILT=$((SECONDS - BEGIN))

timeout 240 python3 -m pytest tests/gpu -q --tb=short -p no:cacheprovider --junitxml="$OUT/tests.xml" "$@" 2>&1 |
    tee "$OUT/tests.log" | tail -120
TESTED=$((SECONDS - BEGIN - BUILT))
timeout 120 python3 benchmarks/gpu_kernels.py --json "$OUT/kernels.json" --cache "$CACHE" 2>&1 | tee "$OUT/kernels.log"

python3 - "$OUT" "$BUILT" "$TESTED" "$((SECONDS - BEGIN))" <<'PY'
import json, sys, xml.etree.ElementTree as xml
from pathlib import Path

out, built, tested, total = Path(sys.argv[1]), *map(int, sys.argv[2:])
tests = []
if (out / "tests.xml").exists():
    for case in xml.parse(out / "tests.xml").iter("testcase"):
        outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        tests.append({"name": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome,
                      "seconds": float(case.get("time", 0))})
counts = {o: sum(t["outcome"] == o for t in tests) for o in ("passed", "failure", "error", "skipped")}
kernels = json.loads((out / "kernels.json").read_text()) if (out / "kernels.json").exists() else None
(out / "session.json").write_text(json.dumps(
    {"seconds": {"build": built, "tests": tested, "all": total}, "counts": counts, "tests": tests,
     "kernels": kernels}, indent=1) + "\n")
print(f"\nbuild {built} s, tests {tested} s, all {total} s; tests: "
      + ", ".join(f"{n} {o}" for o, n in counts.items() if n))
for t in tests:
    if t["outcome"] in ("failure", "error"):
        print(f"  {t['outcome']:8} {t['name']}")
for t in sorted(tests, key=lambda t: -t["seconds"])[:5]:
    print(f"  {t['seconds']:7.1f} s {t['name']}")
PY
