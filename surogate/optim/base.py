"""What optimizers share: the clipped gradient norm, and a walk over the groups of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from surogate.compile.groups import Group, same_place
from surogate.compile.memory import Memory
from surogate.graph import Graph, GraphError, Type, Value


@dataclass(frozen=True)
class Update:
    """The graph that is built, the slots of its sources, and where they come from."""

    graph: Graph
    slots: dict[Value, str]
    memory: Memory

    def state(self, name: str) -> Value:
        """The state that lies in a slot or alias; one value however often it is asked for."""
        found = self.graph.find(name)
        if found is not None:
            return found
        slot = self.memory.slot(name)
        value = self.graph.source(name, Type(slot.type.shape, slot.type.dtype), "state")
        self.slots[value] = name
        return value

    def constant(self, name: str, array: np.ndarray) -> Value:
        """Numbers that never change, float32; their slot is of the same name."""
        found = self.graph.find(name)
        if found is not None:
            return found
        value = self.graph.source(name, Type(array.shape), "const")
        self.graph.constants[name] = array
        self.slots[value] = name
        return value

    def apply(
        self, op: str, held: Sequence[Value], given: Sequence[Value], master: Value | None, *seeds: Value | None,
        **attrs: Any,
    ) -> None:  # fmt: skip
        """Emit an op of the form ``held, given, master?, seeds? -> held, master?``, which changes ``held`` and
        ``master`` in place."""
        outs = self.graph.emit(op, [*held, *given, master, *seeds], **attrs)
        for old, new in zip([*held, master], outs, strict=True):
            if old is not None and new is not None:
                self.graph.updates[old] = new


@dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """Global clipping (0: none) and decoupled weight decay, which groups without decay (norms and biases) do not get.

    Subclasses say which states a group has and how it is updated.
    """

    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    #: Prefixes of the slots of states, ``<prefix>.<weight>``.
    states: ClassVar[tuple[str, ...]] = ("master",)

    def kind(self, name: str, shapes: Sequence[tuple[int, ...]]) -> str:
        """Which of the optimizer's rules a weight follows; groups are made of weights of one kind.

        Args:
            name: of the weight.
            shapes: its shape; several if weights are stored as the rows of one.
        """
        return ""

    def reserve(self, memory: Memory, group: Group, master: bool) -> None:
        """Slots for the states of a group; ``master``: float32 copies of bf16 weights."""
        if master and group.dtype == "bf16":
            same_place(memory, group, "master", "f32", "optimizer")

    def update_group(self, u: Update, group: Group, salt: int) -> None:
        """Emit the update of a group. ``salt``: of its random numbers."""
        raise NotImplementedError

    def draws(self, group: Group, memory: Memory) -> bool:
        """Whether the update of a group rounds stochastically."""
        name = f"master:{group.name}"
        return group.dtype == "bf16" and name not in memory.aliases and name not in memory.slots

    def norm_graph(self, memory: Memory, groups: Sequence[Group], ranks: int = 1) -> tuple[Graph, dict[Value, str]]:
        """Global gradient norm and the factor that clips it. With several ranks each sums over the parts that it is
        given, whatever else of the gradients it has, so that the norm has the same bits whoever keeps what."""
        u = Update(Graph("norm_step"), {}, memory)
        total: Value | None = None
        for group in groups:
            total = u.graph.one("sum_squares", [u.state(f"grad:{group.name}"), total])
        if ranks > 1:
            total = u.graph.one("all_reduce", [total])
            u.graph.updates[u.state("loss")] = u.graph.one("all_reduce", [u.state("loss")])
        norm, scale = u.graph.emit("clip_scale", [total], max_norm=float(self.max_grad_norm))
        if norm is None or scale is None:
            raise GraphError("clip_scale has two results")
        u.graph.updates[u.state("grad_norm")] = norm
        u.graph.updates[u.state("clip_scale")] = scale
        return u.graph, u.slots

    def update_graph(self, memory: Memory, groups: Sequence[Group]) -> tuple[Graph, dict[Value, str]]:
        """The update of every weight; gradients are zero afterwards."""
        u = Update(Graph("optimizer_step"), {}, memory)
        for group in groups:
            for piece in group.all_parts() if self.draws(group, memory) else [group]:
                self.update_group(u, piece, piece.salt)
        return u.graph, u.slots

    def decay(self, group: Group) -> float:
        """Weight decay of a group."""
        return self.weight_decay if group.decay else 0.0


def master_of(u: Update, group: Group) -> Value | None:
    """The float32 copies of a group's weights, if there are any."""
    name = f"master:{group.name}"
    return u.state(name) if name in u.memory.aliases or name in u.memory.slots else None
