"""The program: what the compiler makes and the native engine runs.

Printable (:meth:`Program.format`), serialisable (:meth:`Program.to_json`) and hashable (:attr:`Program.digest`): two
programs with one digest do the same work at the same addresses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from surogate.graph import DTYPE_BYTES

Space = Literal["device", "pinned", "host"]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A typed, strided window of an arena; ``offset`` in bytes, ``strides`` in elements, last dimension contiguous."""

    space: Space
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """First byte after the window."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) if all(self.shape) else -1
        return self.offset + (last + 1) * DTYPE_BYTES[self.dtype]

    def tuple(self) -> tuple[str, int, str, tuple[int, ...], tuple[int, ...]]:
        return (self.space, self.offset, self.dtype, self.shape, self.strides)

    def __str__(self) -> str:
        dense = dense_strides(self.shape) == self.strides
        strides = "" if dense else f" strides {list(self.strides)}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]@{self.space[0]}{self.offset:#x}{strides}"


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


@dataclass(slots=True)
class Instruction:
    """One kernel call. ``waits`` and ``signal`` are events of this program; ``scope`` and ``phase`` are for people."""

    op: str
    inputs: list[TensorRef | None]
    outputs: list[TensorRef | None]
    workspace: TensorRef | None
    attrs: dict[str, Any]
    stream: str = "compute"
    waits: list[int] = field(default_factory=list)
    signal: int = -1
    scope: str = ""
    phase: str = ""
    flops: int = 0
    nbytes: int = 0

    def tuple(self) -> tuple[Any, ...]:
        """The form that ``surogate._native`` takes."""

        def refs(items: list[TensorRef | None]) -> list[Any]:
            return [None if r is None else r.tuple() for r in items]

        workspace = None if self.workspace is None else self.workspace.tuple()
        attrs = {k: v for k, v in self.attrs.items() if isinstance(v, (bool, int, float, str))}
        return (self.op, refs(self.inputs), refs(self.outputs), workspace, attrs, self.stream, self.waits, self.signal)

    def format(self) -> str:
        def refs(items: list[TensorRef | None]) -> str:
            return ", ".join("_" if r is None else str(r) for r in items)

        attrs = "".join(f" {k}={v}" for k, v in sorted(self.attrs.items()))
        sync = "".join(f" wait({w})" for w in self.waits) + (f" signal({self.signal})" if self.signal >= 0 else "")
        work = f" work={self.workspace}" if self.workspace else ""
        call = f"{self.op}({refs(self.inputs)}) -> {refs(self.outputs)}"
        return f"{self.stream:7} {call}{work}{attrs}{sync}  # {self.scope}"


@dataclass
class Program:
    """Instructions in issue order, and the symbols by which the host reads and writes."""

    name: str
    instructions: list[Instruction]
    symbols: dict[str, TensorRef]
    events: int = 0

    @property
    def flops(self) -> int:
        return sum(i.flops for i in self.instructions)

    @property
    def nbytes(self) -> int:
        """The fewest bytes that the instructions must move."""
        return sum(i.nbytes for i in self.instructions)

    def format(self) -> str:
        """The readable program: symbols, then an instruction a line."""
        lines = [f"program {self.name}"]
        lines += [f"  symbol {n} = {r}" for n, r in self.symbols.items()]
        lines += [f"  {index:5} {i.format()}" for index, i in enumerate(self.instructions)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """A canonical serialisation: what the engine sees, nothing else."""
        return json.dumps(
            {
                "name": self.name,
                "instructions": [i.tuple() for i in self.instructions],
                "symbols": {n: r.tuple() for n, r in self.symbols.items()},
                "events": self.events,
            },
            separators=(",", ":"),
            sort_keys=True,
        )

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()
