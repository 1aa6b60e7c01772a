"""Surogate: configuration, compiler, engine and feeder as ``surogate sft`` uses them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sides.common import Task, peak_rss, serve, task, vocabulary_of
from surogate import __version__, _native
from surogate.compile.compiler import Compiled
from surogate.compile.program import Instruction
from surogate.config import make_config
from surogate.train.runtime import Runtime
from surogate.train.setup import Device, compile_config, load_weights, open_model

PROGRAMS = ("micro_step", "norm_step", "optimizer_step")


def runs(t: Task, compiled: Compiled) -> dict[str, int]:
    """How often each program runs in a step: the micro-batch may go through the model in several passes."""
    return {name: t.batch // compiled.batch if name == "micro_step" else 1 for name in PROGRAMS}


def feeder(t: Task, batch: int, folder: Path) -> _native.Feeder:
    """One document a sequence."""
    tokens = t.tokens(vocabulary_of(t.model))
    tokens.tofile(folder / "tokens.bin")
    np.ones(tokens.size, np.uint8).tofile(folder / "mask.bin")
    count = t.steps * t.batch
    starts = np.arange(count, dtype=np.int64) * t.sequence_len
    pieces = np.stack([starts, np.full_like(starts, t.sequence_len), np.zeros_like(starts)], axis=1)
    files = str(folder / "tokens.bin"), str(folder / "mask.bin")
    ends = np.arange(count + 1, dtype=np.int64)
    return _native.Feeder(*files, pieces, ends, batch, t.sequence_len, t.batch, 0)


def exact_flops(t: Task, compiled: Compiled, i: Instruction) -> int:
    """The compiler counts attention as if the tokens of a pass were one document; here they are several."""
    if not i.op.startswith("attention"):
        return i.flops
    documents, length = compiled.batch, t.sequence_len
    whole = documents * length
    return i.flops * documents * length * (length + 1) // (whole * (whole + 1))


def family(t: Task, i: Instruction) -> str:
    """Products by what they are for: the rest goes by its op."""
    if i.op != "matmul":
        return i.op
    if t.mode == "lora" and _least(i) <= 4 * t.rank:
        return "matmul, of an adapter"
    if i.attrs["ta"]:
        return "matmul, gradient of a weight"
    return "matmul, gradient of an input" if i.phase == "backward" else f"matmul, {i.phase}"


def _least(i: Instruction) -> int:
    """The smallest of the three dimensions of a product."""
    a, out = i.inputs[0], i.outputs[0]
    assert a is not None and out is not None
    return min(*a.shape, *out.shape)


def form(i: Instruction) -> str:
    """Equal for instructions that do the same work on tensors of the same shapes and strides."""
    refs = [(r.dtype, r.shape, r.strides) if r is not None else None for r in [*i.inputs, *i.outputs]]
    return f"{i.op} {refs} {sorted(i.attrs.items())}"


class Profile:
    """Seconds of every instruction over the steps that were profiled."""

    def __init__(self, t: Task, runtime: Runtime) -> None:
        self.task, self.engine, self.compiled = t, runtime.engine, runtime.compiled
        self.programs, self.runs = self.compiled.programs, runs(t, self.compiled)
        self.best: dict[str, float] = {}  # of all instructions of a form, over all steps

    def __call__(self, step: Callable[[], float]) -> dict[str, Any]:
        """Profile one step. A row a family: seconds of this step; ``best``, the sum of what its instructions take
        when nothing else disturbs them, each at the best of its form so far; flops, bytes, calls."""
        before = self._report()
        self.engine.profile(True)
        step()
        self.engine.profile(False)
        taken = {at: seconds - before.get(at, 0.0) for at, seconds in self._report().items()}
        for (program, index), seconds in taken.items():
            key = form(self.programs[program].instructions[index])
            self.best[key] = min(self.best.get(key, seconds), seconds / self.runs[program])
        rows: dict[str, dict[str, Any]] = {}
        for (program, index), seconds in taken.items():
            i = self.programs[program].instructions[index]
            new = {"seconds": 0.0, "best": 0.0, "flops": 0, "nbytes": 0, "calls": 0}
            row = rows.setdefault(family(self.task, i), new)
            times = self.runs[program]
            row["seconds"] += seconds
            row["best"] += self.best[form(i)] * times
            row["flops"] += exact_flops(self.task, self.compiled, i) * times
            row["nbytes"] += i.nbytes * times
            row["calls"] += times
        return {"rows": [{"family": name, **row} for name, row in rows.items()]}

    def _report(self) -> dict[tuple[str, int], float]:
        return {(program, index): seconds for program, index, _, _, seconds in self.engine.profile_report()}


def config_of(t: Task) -> Any:
    changes: dict[str, Any] = {"recompute": t.recompute} if t.recompute else {}
    if t.mode == "lora":
        changes |= {"lora": True, "lora_rank": t.rank, "lora_alpha": 2 * t.rank, "lora_dropout": 0.0}
        changes["lora_target_modules"] = "all-linear"
    else:
        changes["lora"] = False
    return make_config(
        {
            "model": t.model,
            "output_dir": "unused",
            "datasets": [{"path": "unused", "type": "text"}],
            "sequence_len": t.sequence_len,
            "per_device_train_batch_size": t.batch,
            "gradient_accumulation_steps": 1,
            "learning_rate": t.learning_rate,
            "weight_decay": 0.0,
            "max_grad_norm": t.max_grad_norm,
            "cpu_threads": t.threads,
            **changes,
        }
    )


def describe(t: Task, compiled: Compiled, runtime: Runtime) -> dict[str, Any]:
    times = runs(t, compiled)
    useful = [(n, i) for n in PROGRAMS for i in compiled.programs[n].instructions if i.phase != "recompute"]
    return {
        "versions": {"surogate": __version__, "blas": _native.blas_name(), "numpy": np.__version__},
        "trainable": compiled.trainable_parameters,
        "flops": sum(times[n] * exact_flops(t, compiled, i) for n, i in useful),
        "pass_batch": compiled.batch,
        "plan": compiled.memory.table(),
        "allocated": runtime.engine.allocated(),
        "rss": peak_rss(),
    }


def main() -> None:
    t = task()
    config = config_of(t)
    files = open_model(config, with_weights=True)
    compiled = compile_config(config, files, Device(), max_documents=t.batch)
    runtime = Runtime(compiled, t.threads)
    load_weights(runtime, files, seed=0)
    with tempfile.TemporaryDirectory(prefix="surogate-bench-") as folder:
        feed, count = feeder(t, compiled.batch, Path(folder)), iter(range(1, t.steps + 1))
        passes = t.batch // compiled.batch

        def step() -> float:
            k = next(count)
            scalars = {"lr": t.learning_rate, "bias_correction1": 1 - 0.9**k, "bias_correction2": 1 - 0.999**k}
            return float(runtime.train_step(feed, passes, scalars, 0, k)["loss"])

        profile = Profile(t, runtime)
        serve(
            describe(t, compiled, runtime),
            step,
            {"profile": lambda: profile(step)},
        )


if __name__ == "__main__":
    main()
