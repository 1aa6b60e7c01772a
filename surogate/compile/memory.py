"""Memory: slots for what lives from step to step, and offsets for what lives within one program.

:func:`place` solves the second: every buffer has a size and a lifetime (first and last instruction), buffers whose
lifetimes meet must not overlap, and the highest byte should be low. Offsets are chosen greedily for several orders
of the buffers and the best result is taken; :func:`live_bytes` is the lower bound that no order can beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from surogate.compile.program import Space, TensorRef, dense_strides
from surogate.graph import DTYPE_BYTES, Type

ALIGN = 64  # bytes; also the alignment, in elements, of trainable slots (see Memory.add)

PURPOSES = ("weights", "gradients", "optimizer", "activations", "workspace", "inputs")


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of ``nbytes`` that lives from instruction ``first`` to ``last``, both included."""

    nbytes: int
    first: int
    last: int


def live_bytes(buffers: Sequence[Lifetime]) -> np.ndarray:
    """Bytes alive at every instruction."""
    end = max((b.last for b in buffers), default=-1) + 2
    change = np.zeros(end, np.int64)
    for b in buffers:
        change[b.first] += aligned(b.nbytes)
        change[b.last + 1] -= aligned(b.nbytes)
    return np.cumsum(change)[:-1]


def aligned(n: int, to: int = ALIGN) -> int:
    """``n`` rounded up to a multiple of ``to``."""
    return -(-n // to) * to


def place(buffers: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets (bytes, aligned) of the buffers, and the height of the arena."""
    if not buffers:
        return [], 0
    orders = [
        sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, buffers[i].first)),
        sorted(range(len(buffers)), key=lambda i: (buffers[i].first - buffers[i].last, -buffers[i].nbytes)),
        sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -buffers[i].last)),
    ]
    floor = int(live_bytes(buffers).max())
    best: tuple[list[int], int] | None = None
    for order in orders:
        found = _greedy(buffers, order)
        if best is None or found[1] < best[1]:
            best = found
        if best[1] == floor:
            break
    assert best is not None
    return best


def _greedy(buffers: Sequence[Lifetime], order: Sequence[int]) -> tuple[list[int], int]:
    """Give each buffer in turn the lowest gap that is free for its whole life."""
    n = len(buffers)
    starts, ends = np.zeros(n, np.int64), np.zeros(n, np.int64)
    firsts, lasts = np.zeros(n, np.int64), np.zeros(n, np.int64)
    offsets = [0] * n
    for count, index in enumerate(order):
        b = buffers[index]
        size = aligned(b.nbytes)
        meets = np.nonzero((firsts[:count] <= b.last) & (lasts[:count] >= b.first))[0]
        offset = 0
        if len(meets):
            meets = meets[np.argsort(starts[meets], kind="stable")]
            tops = np.concatenate(([0], np.maximum.accumulate(ends[meets])))
            gaps = np.nonzero(np.concatenate((starts[meets], [np.iinfo(np.int64).max])) - tops >= size)[0]
            offset = int(tops[gaps[0]])
        starts[count], ends[count], firsts[count], lasts[count] = offset, offset + size, b.first, b.last
        offsets[index] = offset
    return offsets, int(ends.max())


@dataclass
class Slot:
    """Memory that lives as long as the engine."""

    name: str
    type: Type
    purpose: str
    offset: int
    space: Space = "device"

    @property
    def ref(self) -> TensorRef:
        return TensorRef(self.space, self.offset, self.type.dtype, self.type.shape, dense_strides(self.type.shape))


@dataclass(frozen=True, slots=True)
class Spread:
    """Where a tensor lies whose numbers several ranks share: from number ``first`` on in what the slots ``slot`` of all
    ranks, one after the other, hold."""

    slot: str
    first: int
    shape: tuple[int, ...]


@dataclass
class Memory:
    """One arena a space: slots first, then the region that the programs share for what lives within one run."""

    slots: dict[str, Slot] = field(default_factory=dict)
    top: dict[Space, int] = field(default_factory=lambda: {"device": 0, "pinned": 0, "host": 0})
    parts: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # name -> (packed slot, first row, rows)
    aliases: dict[str, Slot] = field(default_factory=dict)  # other names and types for the bytes of slots
    spread: dict[str, Spread] = field(default_factory=dict)  # tensors of which each rank has a part
    temporary: int = 0  # height of the shared region
    peak_by_purpose: dict[str, int] = field(default_factory=dict)  # within the shared region, at its fullest
    floor: int = 0  # most bytes alive at once: no placement could be lower

    def add(self, name: str, type: Type, purpose: str, *, space: Space = "device") -> Slot:
        """Reserve a slot. Every slot spans a multiple of 64 elements, so that slots of several dtypes that stand in one
        order (weights, gradients, moments) have the same distances in elements, and one instruction can run over all
        of them."""
        slot = Slot(name, type, purpose, self.top[space], space)
        self.top[space] += aligned(type.numel, ALIGN) * DTYPE_BYTES[type.dtype]
        self.slots[name] = slot
        return slot

    def ref(self, name: str) -> TensorRef:
        """Where a slot, or a part of a packed slot, lies."""
        if name in self.slots:
            return self.slots[name].ref
        whole, start, rows = self.parts[name]
        slot = self.slots[whole]
        width = slot.type.numel // slot.type.shape[0]
        shape = (rows, *slot.type.shape[1:])
        offset = slot.offset + start * width * DTYPE_BYTES[slot.type.dtype]
        return TensorRef(slot.space, offset, slot.type.dtype, shape, dense_strides(shape))

    def alias(self, name: str, names: Sequence[str]) -> Slot:
        """Slots that stand one after the other, as one flat tensor (the gaps between them are zeros)."""
        first, last = self.slots[names[0]], self.slots[names[-1]]
        size = DTYPE_BYTES[first.type.dtype]
        n = (last.offset - first.offset) // size + aligned(last.type.numel, ALIGN)
        slot = Slot(name, Type((n,), first.type.dtype), first.purpose, first.offset, first.space)
        self.aliases[name] = slot
        return slot

    def cut(self, name: str, parts: int) -> None:
        """Aliases ``name/0``, ``name/1``, ... for equal parts of an alias."""
        whole = self.aliases[name]
        n, size = whole.type.numel // parts, DTYPE_BYTES[whole.type.dtype]
        for r in range(parts):
            part = Slot(f"{name}/{r}", Type((n,), whole.type.dtype), whole.purpose, whole.offset + r * n * size)
            self.aliases[part.name] = part

    def slot(self, name: str) -> Slot:
        """A slot or an alias by name."""
        return self.slots.get(name) or self.aliases[name]

    def size(self, space: Space) -> int:
        """Bytes that the engine allocates in this space."""
        return self.top[space] + (self.temporary if space == "device" else 0)

    def table(self) -> dict[str, int]:
        """Bytes by purpose over all spaces; sums to what the engine allocates."""
        rows = dict.fromkeys(PURPOSES, 0)
        for slot in self.slots.values():
            rows[slot.purpose] += aligned(slot.type.numel, ALIGN) * DTYPE_BYTES[slot.type.dtype]
        for purpose, nbytes in self.peak_by_purpose.items():
            rows[purpose] += nbytes
        return rows
