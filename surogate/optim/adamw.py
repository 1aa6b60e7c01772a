"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.

All weights of a group lie one after the other, so one instruction updates them all. Moments are float32, bfloat16
(rounded stochastically) or eight bits an element (``adamw_8bit``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from surogate.compile.groups import Group, same_place
from surogate.compile.memory import Memory
from surogate.graph import Type
from surogate.ops.blockwise8 import BLOCK, dynamic_map
from surogate.optim.base import OptimizerBase, Update, master_of


@dataclass(frozen=True)
class AdamW(OptimizerBase):
    """Coefficients; ``moments``: dtype in which first and second moment are kept, ``f32`` or ``bf16``."""

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


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with block-wise eight-bit moments (Dettmers et al. 2021), the numbers of bitsandbytes.

    Matrices of at least 4096 elements, in whole blocks of 256, have them; what is smaller (norms, biases) keeps moments
    as ``moments`` says, which costs next to nothing.
    """

    states: ClassVar[tuple[str, ...]] = ("adam_m", "adam_v", "adam_m_absmax", "adam_v_absmax", "master")
    _MAPS: ClassVar[dict[str, bool]] = {"dynamic_map_signed": True, "dynamic_map_unsigned": False}

    def kind(self, name: str, shapes: Sequence[tuple[int, ...]]) -> str:
        """Weights in eight bits are ``8bit``. Weights that are stored together all have to fit: blocks never span two."""
        sizes = [Type(shape).numel for shape in shapes]
        fits = all(len(s) > 1 for s in shapes) and min(sizes) >= 4096 and not any(n % BLOCK for n in sizes)
        return "8bit" if fits else ""

    def reserve(self, memory: Memory, group: Group, master: bool) -> None:
        """Slots: a byte an element and a float32 a block, for either moment; and the two tables of numbers."""
        if group.kind != "8bit":
            super().reserve(memory, group, master)
            return
        for prefix in ("adam_m", "adam_v"):
            same_place(memory, group, prefix, "u8", "optimizer")
            whole = memory.aliases[f"{prefix}:{group.name}"]
            blocks = memory.add(f"{prefix}_absmax:{group.name}", Type((whole.type.numel // BLOCK,)), "optimizer")
            for weight in group.slots:
                slot = memory.slots[f"{prefix}.{weight}"]
                first = (slot.offset - whole.offset) // BLOCK
                memory.parts[f"{prefix}_absmax.{weight}"] = (blocks.name, first, slot.type.numel // BLOCK)
        if master and group.dtype == "bf16":
            same_place(memory, group, "master", "f32", "optimizer")
        for name in self._MAPS:
            if name not in memory.slots:
                memory.add(name, Type((256,)), "optimizer")

    def update_group(self, u: Update, group: Group, salt: int) -> None:
        """One ``adamw_8bit`` over the whole group."""
        if group.kind != "8bit":
            super().update_group(u, group, salt)
            return
        states = ("weight", "grad", "adam_m", "adam_v", "adam_m_absmax", "adam_v_absmax")
        held = [u.state(f"{n}:{group.name}") for n in states]
        maps = [u.constant(name, dynamic_map(signed)) for name, signed in self._MAPS.items()]
        scalars = [u.state(n) for n in ("lr", "bias_correction1", "bias_correction2", "clip_scale")]
        master = master_of(u, group)
        seed = u.state("seed") if group.dtype == "bf16" and master is None else None
        u.apply(
            "adamw_8bit", held, [*maps, *scalars], master, seed, beta1=self.beta1, beta2=self.beta2,
            eps=self.epsilon, weight_decay=self.decay(group), salt=salt,
        )  # fmt: skip
