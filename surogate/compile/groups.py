"""What the compiler asks of an optimizer: slots for its states, and the graphs that end a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from surogate.compile.memory import Memory, Spread, aligned
from surogate.graph import Graph, Type, Value

PART_ALIGN = 256  # elements: whole blocks of eight-bit states, whole lines of every dtype


@dataclass(frozen=True)
class Group:
    """Trained weights that are updated alike: names of their slots, one after the other in memory.

    Its weights, gradients and states are the aliases ``weight:<name>``, ``grad:<name>`` and ``<state>:<name>``. Where
    several ranks train, a group has as many equal ``parts``, with a filling at its end; those of part r are
    ``weight:<name>/<r>`` and so on, which belong to rank r. ``sharded``: a rank keeps the states of its own part alone.
    """

    name: str
    slots: tuple[str, ...]
    decay: bool
    dtype: str
    kind: str = ""  # which of the optimizer's rules they follow
    salt: int = 0  # of the random numbers of its update
    parts: int = 1
    sharded: bool = False

    def part(self, index: int) -> Group:
        """One of its parts, as a group: the same elements are drawn the same numbers however many parts are updated at
        once."""
        if self.parts == 1:
            return self
        return replace(self, name=f"{self.name}/{index}", salt=self.salt * self.parts + index, parts=1)

    def all_parts(self) -> list[Group]:
        """Every part."""
        return [self.part(index) for index in range(self.parts)]


class Optimizer(Protocol):
    """A file in ``surogate/optim/`` defines one. ``states``: prefixes of the slots ``<prefix>.<weight>``."""

    @property
    def states(self) -> tuple[str, ...]:
        """Prefixes of the slots that :meth:`reserve` adds for each weight."""

    def kind(self, name: str, shapes: Sequence[tuple[int, ...]]) -> str:
        """Which of the optimizer's rules a weight follows; ``shapes``: of the weights that its rows are."""

    def reserve(self, memory: Memory, group: Group, master: bool) -> None:
        """Add slots for the states of a group; ``master``: f32 copies of weights that are stored in bf16."""

    def norm_graph(self, memory: Memory, groups: Sequence[Group], ranks: int = 1) -> tuple[Graph, dict[Value, str]]:
        """Graph ``norm_step``: gradient norm and clipping factor into their slots; and the slot of every source. With
        several ranks, the groups are the parts of one rank, and the loss becomes that of all."""

    def update_graph(self, memory: Memory, groups: Sequence[Group]) -> tuple[Graph, dict[Value, str]]:
        """Graph ``optimizer_step``: new weights and states, gradients zero; and the slot of every source."""


def gradient_slot(weight: str) -> str:
    """Name of the slot that holds a weight's gradient."""
    return f"grad.{weight}"


def same_place(memory: Memory, group: Group, prefix: str, dtype: str, purpose: str) -> None:
    """Add a slot ``<prefix>.<weight>`` for every weight of the group, in the same order; of a sharded group one slot,
    for this rank's part of them."""
    if group.sharded:
        whole = memory.aliases[f"weight:{group.name}"]
        slot = memory.add(f"{prefix}:{group.name}", Type((whole.type.numel // group.parts,), dtype), purpose)
        for r in range(group.parts):
            memory.aliases[f"{slot.name}/{r}"] = slot
        for weight in group.slots:
            held = memory.slots[weight]
            first = (held.offset - whole.offset) * whole.type.numel // whole.type.nbytes
            memory.spread[f"{prefix}.{weight}"] = Spread(slot.name, first, held.type.shape)
        return
    for weight in group.slots:
        memory.add(f"{prefix}.{weight}", Type(memory.slots[weight].type.shape, dtype), purpose)
    in_parts(memory, group, f"{prefix}:{group.name}", [f"{prefix}.{w}" for w in group.slots], purpose)


def in_parts(memory: Memory, group: Group, name: str, slots: Sequence[str], purpose: str) -> None:
    """Alias slots that were just added one after the other as ``name``, filled up to equal parts ``name/<r>``."""
    first, last = memory.slots[slots[0]], memory.slots[slots[-1]]
    size = first.type.nbytes // first.type.numel
    used = (last.offset - first.offset) // size + aligned(last.type.numel)
    spare = aligned(used, group.parts * PART_ALIGN) - used if group.parts > 1 else 0
    if spare:
        memory.add(f"filling:{name}", Type((spare,), first.type.dtype), purpose)
        slots = [*slots, f"filling:{name}"]
    memory.alias(name, slots)
    if group.parts > 1:
        memory.cut(name, group.parts)
