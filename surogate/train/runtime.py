"""A compiled model in a native engine: arenas allocated as planned, programs loaded, memory readable by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from surogate import _native
from surogate.compile.compiler import Compiled
from surogate.compile.emit import check_kernels
from surogate.compile.program import TensorRef
from surogate.errors import TrainingFailed
from surogate.graph import DTYPE_BYTES
from surogate.io.dtypes import bf16_to_f32

_NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u8": np.uint8, "bf16": np.uint16}

# How engines begin the message of an instruction that failed.
_INSTRUCTION = re.compile(r"(\w+), instruction (\d+) \(\w+\): (.*)", re.DOTALL)


class Runtime:
    """Owns the engine of a run.

    Allocates exactly what the plan says (``compiled.memory``), zero filled, and loads the programs and constants.
    """

    def __init__(
        self, compiled: Compiled, threads: int, gpu: Mapping[str, Any] | None = None, *, check_nan: bool = False,
        communicator: _native.Communicator | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            compiled: what to run.
            threads: of the CPU engine.
            gpu: arguments of a GPU's engine (``surogate.cuda.engine_arguments``); None: the CPU.
            check_nan: on the CPU, stop at the first instruction that writes a NaN (a GPU's arguments say it for a GPU).
            communicator: of one of several ranks on the CPU; ``compiled`` must then be that rank's.
        """
        self.compiled, self.threads, self.on_gpu = compiled, threads, gpu is not None
        here = {"backend": "cpu", "config": f"check_nan={int(check_nan)}"}
        self.engine = _native.Engine(threads=threads, **(here if gpu is None else gpu))
        if communicator is not None:
            self.engine.join(communicator)
        device = "cpu" if gpu is None else "cuda"
        check_kernels(list(compiled.programs.values()), set(self.engine.kernels()), device)
        for space in ("device", "pinned", "host"):
            nbytes = compiled.memory.size(space)
            if nbytes:
                self.engine.allocate(space, nbytes)
        for name, program in compiled.programs.items():
            symbols = {n: r.tuple() for n, r in program.symbols.items()}
            self.engine.load(name, [i.tuple() for i in program.instructions], symbols, program.events)
        for name, data in compiled.constants.items():
            self.write(compiled.memory.ref(name), np.frombuffer(data, np.float32))

    def read(self, ref: TensorRef) -> np.ndarray:
        """A dense tensor as an array: on the CPU the memory itself, writable; from a GPU a copy. bf16 appears as its
        bits, uint16."""
        n = DTYPE_BYTES[ref.dtype]
        for d in ref.shape:
            n *= d
        if self.on_gpu and ref.space == "device":
            view: np.ndarray = self.engine.read(ref.space, ref.offset, n)
        else:
            view = self.engine.memory(ref.space, ref.offset, n)
        return view.view(_NUMPY[ref.dtype]).reshape(ref.shape)

    def fill(self, ref: TensorRef, put: Callable[[np.ndarray], None]) -> None:
        """Let ``put`` write a dense tensor through an array as :meth:`read` gives it."""
        if not (self.on_gpu and ref.space == "device"):
            put(self.read(ref))
            return
        staged = np.empty(ref.shape, _NUMPY[ref.dtype])
        put(staged)
        self.engine.write(ref.space, ref.offset, staged.reshape(-1).view(np.uint8))

    def write(self, ref: TensorRef, values: np.ndarray) -> None:
        """Copy values of the tensor's own dtype (bf16: bits) to it."""
        self.fill(ref, lambda target: np.copyto(target.reshape(-1), values.reshape(-1), casting="no"))

    @property
    def ranks(self) -> int:
        """Engines that train together."""
        return 1

    def allocated(self) -> dict[str, int]:
        """Bytes really taken, a space; of all ranks of this process."""
        return self.engine.allocated()

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name, on whatever ranks it lies."""
        memory = self.compiled.memory
        return name in memory.slots or name in memory.parts or name in memory.spread

    def array(self, name: str) -> np.ndarray:
        """A slot, or a part of one, by name; see :meth:`read`."""
        return self.read(self.compiled.memory.ref(name))

    def put(self, name: str, values: np.ndarray) -> None:
        """Copy values of the tensor's own dtype to what :meth:`array` reads."""
        self.write(self.compiled.memory.ref(name), values)

    def values(self, name: str) -> np.ndarray:
        """A float32 copy of a weight, gradient or state by name."""
        data = self.array(name)
        return bf16_to_f32(data) if data.dtype == np.uint16 else data.astype(np.float32)

    def trained(self, name: str) -> np.ndarray:
        """A weight at its best precision: its f32 master copy where there is one. As :meth:`read` gives it."""
        return self.array(f"master.{name}" if self.holds(f"master.{name}") else name)

    def train_step(
        self, feeder: Any, accumulation: int, scalars: dict[str, float], seed: int, step: int
    ) -> dict[str, Any]:
        """One optimizer step; see ``Engine.train_step``."""
        with self._named():
            result: dict[str, Any] = self.engine.train_step(feeder, accumulation, scalars, seed, step)
        return result

    def evaluate(self, feeder: Any, batches: int) -> dict[str, Any]:
        """Summed loss and targets over a number of micro-batches."""
        with self._named():
            result: dict[str, Any] = self.engine.evaluate(feeder, batches)
        return result

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An instruction that failed is told with its layer, without a traceback."""
        try:
            yield
        except RuntimeError as error:
            found = _INSTRUCTION.fullmatch(str(error))
            program = self.compiled.programs.get(found[1]) if found else None
            if found is None or program is None:
                raise
            instruction = program.instructions[int(found[2])]
            place = f"{instruction.op} of {instruction.scope or 'the model'}, {instruction.phase} pass"
            raise TrainingFailed(f"{place} ({found[1]}, instruction {found[2]}): {found[3]}") from error


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads counted once: BLAS gains nothing from the second."""
    allowed = os.sched_getaffinity(0)
    seen = set()
    for cpu in allowed:
        base = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            seen.add(((base / "physical_package_id").read_text().strip(), (base / "core_id").read_text().strip()))
        except OSError:
            return len(allowed)
    return max(1, len(seen))
