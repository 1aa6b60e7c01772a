"""Helpers for tests that run compiled models: write inputs by name, run a program, read results by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.models import build
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from surogate.train.runtime import Runtime


@dataclass
class Rows:
    """Documents laid out as a micro-batch: ``sequences`` is a list of sequences, each a list of documents, each a list
    of token ids. Every token but a document's first is a target unless ``masked`` says otherwise."""

    sequences: list[list[list[int]]]
    sequence_len: int
    pad_id: int = 0

    def arrays(self, max_documents: int, masked: Any = None) -> dict[str, np.ndarray]:
        ids, targets, positions, bounds = [], [], [], [0]
        for s, documents in enumerate(self.sequences):
            used = 0
            for d, document in enumerate(documents):
                ids += document
                positions += range(len(document))
                labels = [t if masked is None or not masked(s, d, i) else -100 for i, t in enumerate(document)]
                targets += [*labels[1:], -100]
                used += len(document)
                bounds.append(bounds[-1] + len(document))
            pad = self.sequence_len - used
            if pad:
                ids += [self.pad_id] * pad
                positions += range(pad)
                targets += [-100] * pad
                bounds.append(bounds[-1] + pad)
        bounds += [len(ids)] * (max_documents + 1 - len(bounds))
        out = {"ids": ids, "targets": targets, "positions": positions, "cu_seqlens": bounds}
        return {n: np.array(v, np.int32) for n, v in out.items()}


def make_runtime(
    config: dict[str, Any], *, batch: int, sequence_len: int, max_documents: int, lora: LoraOptions | None = None,
    recompute: str = "off", threads: int = 2, recipe: str = "fp32", master: bool = True, optimizer: Any = None,
    evaluate: bool = False, stored: Any = lambda name: "f32",
) -> Runtime:  # fmt: skip
    """Compile a model and load it into an engine."""
    options = CompileOptions(
        batch, sequence_len, max_documents, get_recipe(recipe, master=master), batch if evaluate else 0,
        max_documents if evaluate else 0, lora, optimizer or AdamW(), recompute, threads,  # type: ignore[arg-type]
    )  # fmt: skip
    return Runtime(compile_model(build(config), options, stored), threads)


def symbol(runtime: Runtime, program: str, name: str) -> np.ndarray:
    """A symbol of a program, writable."""
    return runtime.read(runtime.compiled.programs[program].symbols[name])


def micro_step(runtime: Runtime, arrays: dict[str, np.ndarray], loss_scale: float, seed: int = 0) -> float:
    """Run one micro-step on these inputs; gradients accumulate. Returns the summed loss of this micro-step."""
    symbols = runtime.compiled.programs["micro_step"].symbols
    values = {
        **arrays,
        "loss_scale": np.array([loss_scale], np.float32),
        "loss": np.zeros(1),
        "seed": np.array([seed], np.int64),
    }
    for name, value in values.items():
        if name in symbols:
            runtime.write(symbols[name], value)
    runtime.engine.run("micro_step")
    return float(runtime.read(symbols["loss"])[0])


def gradient(runtime: Runtime, name: str) -> np.ndarray:
    """A copy of a weight's accumulated gradient."""
    return runtime.array(f"grad.{name}").copy()


def clear_gradients(runtime: Runtime) -> None:
    for group in runtime.compiled.groups:
        for name in group.slots:
            runtime.array(f"grad.{name}")[...] = 0


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of the expected tensor."""
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))) / max(scale, 1e-30)
