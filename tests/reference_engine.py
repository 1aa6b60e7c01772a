"""An engine that runs compiled programs with the ops' NumPy references, over a real arena.

It has nothing of the native engine, so what it finds is the compiler's: offsets, strides, storage that is shared,
order. Temporaries are filled with NaN before each run, so reading what was never written shows.
"""

from __future__ import annotations

import numpy as np

from surogate.compile.compiler import Compiled
from surogate.compile.program import Program, TensorRef
from surogate.ops import get_op

_NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u8": np.uint8, "bf16": np.uint16}


class ReferenceEngine:
    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.arena = np.zeros(compiled.memory.size("device"), np.uint8)
        for name, data in compiled.constants.items():
            self.view(compiled.memory.ref(name))[...] = np.frombuffer(data, np.float32).reshape(
                compiled.memory.ref(name).shape
            )

    def view(self, ref: TensorRef) -> np.ndarray:
        """The tensor in the arena, writable."""
        dtype = np.dtype(_NUMPY[ref.dtype])
        data = self.arena[ref.offset :].view(np.uint8)
        n = (ref.end - ref.offset) // dtype.itemsize
        flat = data[: n * dtype.itemsize].view(dtype)
        strides = [s * dtype.itemsize for s in ref.strides]
        return np.lib.stride_tricks.as_strided(flat, ref.shape, strides)

    def read(self, ref: TensorRef) -> np.ndarray:
        held = self.view(ref)
        if ref.dtype == "bf16":
            return (held.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return held.astype(np.float64) if held.dtype.kind == "f" else held.copy()

    def slot(self, name: str) -> np.ndarray:
        return self.view(self.compiled.memory.ref(name))

    def symbol(self, program: str, name: str) -> np.ndarray:
        return self.view(self.compiled.programs[program].symbols[name])

    def run(self, name: str) -> None:
        program: Program = self.compiled.programs[name]
        self.arena[self.compiled.memory.top["device"] :] = 0xFF  # NaN in every float dtype
        for instruction in program.instructions:
            inputs = [None if r is None else self.read(r) for r in instruction.inputs]
            if instruction.workspace is not None:
                self.view(instruction.workspace)[...] = 0xFF
            results = get_op(instruction.op).reference(inputs, instruction.attrs)
            for ref, result in zip(instruction.outputs, results, strict=True):
                if ref is not None:
                    assert result is not None
                    self.view(ref)[...] = result
