"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.

All weights of a group lie one after the other, so one instruction updates them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surogate.compile.groups import Group, same_place
from surogate.compile.memory import Memory
from surogate.optim.base import OptimizerBase, Update, master_of


@dataclass(frozen=True)
class AdamW(OptimizerBase):
    """Coefficients; ``moments``: dtype in which first and second moment are kept, ``f32``, or ``bf16`` with stochastic
    rounding."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    moments: str = "f32"

    states: ClassVar[tuple[str, ...]] = ("adam_m", "adam_v", "master")

    def reserve(self, memory: Memory, group: Group, master: bool) -> None:
        """Slots for the states of a group: first and second moment, and the float32 copy of bf16 weights."""
        same_place(memory, group, "adam_m", self.moments, "optimizer")
        same_place(memory, group, "adam_v", self.moments, "optimizer")
        super().reserve(memory, group, master)

    def draws(self, group: Group, memory: Memory) -> bool:
        """Besides the weights, moments in bf16 are rounded stochastically."""
        return self.moments == "bf16" or super().draws(group, memory)

    def update_group(self, u: Update, group: Group, salt: int) -> None:
        """One ``adamw`` over the whole group."""
        weight, grad, m, v = (u.state(f"{n}:{group.name}") for n in ("weight", "grad", "adam_m", "adam_v"))
        scalars = [u.state(n) for n in ("lr", "bias_correction1", "bias_correction2", "clip_scale")]
        master = master_of(u, group)
        seed = u.state("seed") if group.dtype == "bf16" and master is None else None
        moments_seed = u.state("seed") if m.dtype == "bf16" else None
        u.apply(
            "adamw", [weight, grad, m, v], scalars, master, seed, moments_seed, beta1=self.beta1, beta2=self.beta2,
            eps=self.epsilon, weight_decay=self.decay(group), salt=salt,
        )  # fmt: skip


make = AdamW
