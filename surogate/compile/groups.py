"""What the compiler asks of an optimizer: slots for its states, and the graphs that end a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from surogate.compile.memory import Memory
from surogate.graph import Graph, Type, Value


@dataclass(frozen=True)
class Group:
    """Trained weights that are updated alike: names of their slots, one after the other in memory.

    Its weights, gradients and states are the aliases ``weight:<name>``, ``grad:<name>`` and ``<state>:<name>``.
    """

    name: str
    slots: tuple[str, ...]
    decay: bool
    dtype: str
    kind: str = ""  # which of the optimizer's rules they follow


class Optimizer(Protocol):
    """A file in ``surogate/optim/`` defines one. ``states``: prefixes of the slots ``<prefix>.<weight>``."""

    @property
    def states(self) -> tuple[str, ...]:
        """Prefixes of the slots that :meth:`reserve` adds for each weight."""

    def kind(self, name: str, shapes: Sequence[tuple[int, ...]]) -> str:
        """Which of the optimizer's rules a weight follows; ``shapes``: of the weights that its rows are."""

    def reserve(self, memory: Memory, group: Group, master: bool) -> None:
        """Add slots for the states of a group; ``master``: f32 copies of weights that are stored in bf16."""

    def norm_graph(self, memory: Memory, groups: Sequence[Group]) -> tuple[Graph, dict[Value, str]]:
        """Graph ``norm_step``: gradient norm and clipping factor into their slots; and the slot of every source."""

    def update_graph(self, memory: Memory, groups: Sequence[Group]) -> tuple[Graph, dict[Value, str]]:
        """Graph ``optimizer_step``: new weights and states, gradients zero; and the slot of every source."""


def gradient_slot(weight: str) -> str:
    """Name of the slot that holds a weight's gradient."""
    return f"grad.{weight}"


def same_place(memory: Memory, group: Group, prefix: str, dtype: str, purpose: str) -> None:
    """Add a slot ``<prefix>.<weight>`` for every weight of the group, in the same order."""
    for weight in group.slots:
        memory.add(f"{prefix}.{weight}", Type(memory.slots[weight].type.shape, dtype), purpose)
    memory.alias(f"{prefix}:{group.name}", [f"{prefix}.{w}" for w in group.slots])
