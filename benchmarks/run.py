"""Speed and memory of training beside transformers + PEFT on torch, on this machine's CPU.

    python benchmarks/run.py                        # both modes, a few minutes
    python benchmarks/run.py --modes lora --steps 6
    python benchmarks/run.py --only surogate        # no torch: for work on the engine

Both sides are processes of their own, hold the same weights, and take steps in turn (A B A B) on the same tokens, so
that what else the machine does touches both. Matrix product and copy are timed between the steps. The figures are
medians over the steps after warm-up. Without --model the weights are random, in the shape of SmolLM2-135M, and stored
in bfloat16 as that model is published; both sides compute in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
from report import table
from sides.common import Task

from surogate.compile.compiler import CompileOptions, compile_model
from surogate.io.safetensors_writer import array_tensor, write_safetensors
from surogate.models import build
from surogate.recipes import get_recipe
from surogate.train.initial import initialise
from surogate.train.shapes import config_of

HERE = Path(__file__).parent
SIDES = {"surogate": "sides.surogate_side", "torch": "sides.torch_side"}


class Side:
    """One side's process."""

    def __init__(self, name: str, task: Task) -> None:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", SIDES[name], task.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.name, self.ready = name, self._answer()
        self.steps: list[dict[str, Any]] = []

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the side that runs {self.name} ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, request: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(request, file=self.process.stdin, flush=True)
        return self._answer()

    def step(self, patience: float) -> None:
        """One step, taken when the machine is quiet or after ``patience`` seconds. ``others``: processors that
        everybody else kept busy meanwhile."""
        machine.wait_until_quiet(patience)
        before = machine.busy_seconds()
        answer = self.ask("step")
        others = machine.busy_seconds() - before - answer["processor"]
        self.steps.append({**answer, "others": max(0.0, others / answer["seconds"])})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(task: Task, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One mode: every side's steps in turn, the machine's ceilings between them, then profiles of our step."""
    record: dict[str, Any] = {"mode": task.mode, "task": json.loads(task.to_json()), "sides": {}}
    total = args.warmup + args.steps
    sides = [Side(n, replace(task, steps=total + args.profiles)) for n in names]
    copy = machine.CopyRate(task.threads)
    ceilings: list[dict[str, float]] = []
    for index in range(total):
        patience = args.patience if index >= args.warmup else 0.0
        machine.wait_until_quiet(patience)
        ceilings.append({"product": machine.product_rate(task.threads), "copy": copy()})
        for side in sides:
            side.step(patience)
        progress = ", ".join(f"{s.name} {s.steps[-1]['seconds']:.2f} s ({s.steps[-1]['others']:.2f})" for s in sides)
        print(f"{task.mode} step {index + 1}/{total}: {progress}", file=sys.stderr, flush=True)
    for side in sides:
        record["sides"][side.name] = summary(side, task.batch * task.sequence_len, args.warmup)
        if side.name == "surogate":
            profiles = []
            for _ in range(args.profiles):
                machine.wait_until_quiet(args.patience)
                profiles.append(side.ask("profile")["rows"])
            record["profile"] = fastest(profiles)
    for side in sides:
        side.close()
    record["ceilings"] = {
        "product": statistics.median(c["product"] for c in ceilings),
        "copy": statistics.median(c["copy"] for c in ceilings),
        "all": ceilings,
    }
    return record


def summary(side: Side, tokens: int, warmup: int) -> dict[str, Any]:
    """Medians over the steps after warm-up."""

    def median(name: str) -> float:
        return statistics.median(s[name] for s in side.steps[warmup:])

    return {
        **side.ready,
        "seconds": median("seconds"),
        "processor": median("processor"),
        "others": median("others"),
        "tokens_per_second": tokens / median("seconds"),
        "first_loss": side.steps[0]["loss"],
        "peak_rss": side.steps[-1]["rss"],
        "steps": side.steps,
    }


def fastest(profiles: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The fastest of the profiled steps; what its instructions take at best is known from all of them."""
    best = {row["family"]: row["best"] for row in profiles[-1]}
    rows = min(profiles, key=lambda rows: sum(row["seconds"] for row in rows))
    return [{**row, "best": best[row["family"]]} for row in rows]


def random_model(folder: Path, size: str) -> None:
    """A model of that shape with random weights (bfloat16), as a Hugging Face folder."""
    config = {**config_of(size), "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    options = CompileOptions(1, 8, 1, get_recipe("bf16"), eval_batch=1, eval_documents=1, train=False)
    tensors = []
    for weight in compile_model(build(config), options).weights.values():
        bits = np.empty(weight.ref.shape, np.uint16)
        initialise(bits, weight.initial, name=weight.name, seed=0, std=0.02)
        tensors.append(array_tensor(weight.name, bits, "bf16"))
    write_safetensors(folder / "model.safetensors", tensors)


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../surogate", "../csrc")
    return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of a model (default: random weights of --size)")
    parser.add_argument("--size", default="smollm2-135m", help="shape of the random model (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--only", choices=list(SIDES), help="run one side alone")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="that count, of each side (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those (default: %(default)s)")
    parser.add_argument("--profiles", type=int, default=2, help="profiled steps after those (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds that a step waits for a quiet machine")
    parser.add_argument("--recompute", choices=["off", "selective", "block"], default="", help="default: sft's own")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/train-DATE-COMMIT.json; - for none")
    args = parser.parse_args()

    names = [args.only] if args.only else list(SIDES)
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "device": machine.describe(),
        "modes": [],
    }
    with tempfile.TemporaryDirectory(prefix="surogate-bench-") as folder:
        if not args.model:
            random_model(Path(folder), args.size)
        for mode in args.modes:
            task = Task(
                args.model or folder, mode, args.batch, args.sequence_len, args.threads, 0, recompute=args.recompute
            )
            record["modes"].append(measure(task, names, args))
    print(table(record))
    if str(args.json) != "-":
        name = f"train-{time.strftime('%Y%m%d')}-{record['commit'].split()[0]}.json"
        path = args.json or HERE / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
