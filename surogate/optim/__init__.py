"""Optimizers: one file each, builders of the graph that a step ends with."""

from __future__ import annotations

from dataclasses import dataclass

from surogate.compile.memory import Memory


@dataclass(frozen=True)
class Group:
    """Trained weights that are updated alike: names of their slots, one after the other in memory."""

    name: str
    slots: tuple[str, ...]
    decay: bool
    dtype: str


def gradient_slot(weight: str) -> str:
    """Name of the slot that holds a weight's gradient."""
    return f"grad.{weight}"


def same_place(memory: Memory, group: Group, prefix: str, dtype: str, purpose: str) -> None:
    """Add a slot ``<prefix>.<weight>`` for every weight of the group, in the same order."""
    from surogate.graph import Type

    for weight in group.slots:
        memory.add(f"{prefix}.{weight}", Type(memory.slots[weight].type.shape, dtype), purpose)
    memory.alias(f"{prefix}:{group.name}", [f"{prefix}.{w}" for w in group.slots])
