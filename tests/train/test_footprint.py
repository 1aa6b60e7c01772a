"""What a run costs besides the plan: memory of the process, and time to the first step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"


# VmHWM is of this program alone; what rusage tells of a child counts the moment before exec, when it was its parent.
_RUN = """
import sys
from surogate.cli import main
code = main(sys.argv[1:])
line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
print("VmHWM", int(line.split()[1]), file=sys.stderr)
sys.exit(code)
"""


def run(config: Path) -> tuple[int, float, list[dict]]:
    """Peak resident bytes of the process, seconds from command to the end of step 1, and its events."""
    started = time.time()
    command = [sys.executable, "-c", _RUN, "sft", str(config)]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr
    folder = Path(yaml.safe_load(config.read_text())["output_dir"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    first = next(e for e in events if e["event"] == "step")
    peak = int(result.stderr.rsplit("VmHWM", 1)[1]) * 1024
    return peak, first["time"] - started, events


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_smollm2(smollm2: Path, tmp_path: Path, mode: str) -> None:
    """Peak resident memory is at most the plan and 250 MB; what passes until step 1 ends, less its own time, is
    start-up."""
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": str(smollm2),
                "output_dir": str(tmp_path / "out"),
                "cache_dir": str(tmp_path / "cache"),
                "datasets": [{"path": str(EXAMPLES / "events.jsonl")}],
                "sequence_len": 256,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "max_steps": 2,
                "lora": mode == "lora",
            }
        )
    )
    subprocess.run([sys.executable, "-m", "surogate", "tokenize", str(config)], check=True, capture_output=True)
    peak, until_first, events = run(config)
    plan = next(e for e in events if e["event"] == "memory")["total"]
    step = next(e for e in events if e["event"] == "step")["seconds"]
    print(f"{mode}: peak {peak / 1e6:.0f} MB, plan {plan / 1e6:.0f} MB; start-up {until_first - step:.2f} s")
    assert peak <= plan + 250e6
    # 3 s is the aim on a quiet machine (the figure is printed); a busy one gets room.
    assert until_first - step < 10


def test_help_is_quick() -> None:
    """The best of three, with room for a busy machine; 0.3 s is the aim."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "surogate", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    assert min(times) < 1.0


def test_help_imports_nothing_heavy() -> None:
    """No NumPy, pydantic, tokenizers or engine for ``--help``."""
    code = "import sys; from surogate.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('numpy', 'pydantic', 'tokenizers', 'surogate._native', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"
