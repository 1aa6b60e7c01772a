"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay, states in float32.

All weights of a group lie one after the other, so one instruction updates them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surogate.compile.groups import Group, same_place
from surogate.compile.memory import Memory
from surogate.graph import Graph, Type, Value


@dataclass(frozen=True)
class AdamW:
    """Coefficients; weight decay is left out for groups without decay (norms and biases)."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def reserve(self, memory: Memory, group: Group, master: bool) -> None:
        """Slots for the states of a group: first and second moment, and the float32 copy of bf16 weights."""
        same_place(memory, group, "adam_m", "f32", "optimizer")
        same_place(memory, group, "adam_v", "f32", "optimizer")
        if master and group.dtype == "bf16":
            same_place(memory, group, "master", "f32", "optimizer")

    def norm_graph(self, memory: Memory, groups: Sequence[Group]) -> tuple[Graph, dict[Value, str]]:
        """Global gradient norm and the factor that clips it."""
        g = Graph("norm_step")
        slots: dict[Value, str] = {}
        total: Value | None = None
        for group in groups:
            gradient = _state(g, slots, f"grad:{group.name}", memory)
            total = g.one("sum_squares", [gradient, total])
        norm, scale = g.emit("clip_scale", [total], max_norm=float(self.max_grad_norm))
        assert norm is not None and scale is not None
        g.updates[_state(g, slots, "grad_norm", memory)] = norm
        g.updates[_state(g, slots, "clip_scale", memory)] = scale
        return g, slots

    def update_graph(self, memory: Memory, groups: Sequence[Group]) -> tuple[Graph, dict[Value, str]]:
        """The update of every weight; gradients are zero afterwards."""
        g = Graph("optimizer_step")
        slots: dict[Value, str] = {}
        scalars = [_state(g, slots, n, memory) for n in ("lr", "bias_correction1", "bias_correction2", "clip_scale")]
        for salt, group in enumerate(groups):
            names = [f"weight:{group.name}", f"grad:{group.name}", f"adam_m:{group.name}", f"adam_v:{group.name}"]
            held: list[Value | None] = [_state(g, slots, n, memory) for n in names]
            master = f"master:{group.name}"
            kept = _state(g, slots, master, memory) if master in memory.aliases else None
            rounded = group.dtype == "bf16" and kept is None
            seed = (g.find("seed") or _state(g, slots, "seed", memory)) if rounded else None
            outs = g.emit(
                "adamw", [*held, *scalars, kept, seed], beta1=self.beta1, beta2=self.beta2, eps=self.epsilon,
                weight_decay=self.weight_decay if group.decay else 0.0, salt=salt,
            )  # fmt: skip
            for old, new in zip([*held, kept], outs, strict=True):
                if old is not None and new is not None:
                    g.updates[old] = new
        return g, slots


def _state(g: Graph, slots: dict[Value, str], name: str, memory: Memory) -> Value:
    slot = memory.slot(name)
    value = g.source(name, Type(slot.type.shape, slot.type.dtype), "state")
    slots[value] = name
    return value
