"""AdamW with moments of eight bits an element (Dettmers et al. 2021), the numbers of bitsandbytes.

Matrices of at least 4096 elements, in whole blocks of 256, have such moments; what is smaller (norms, biases) keeps
moments as ``adamw`` does, which costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from surogate.compile.groups import Group, same_place
from surogate.compile.memory import Memory, Spread
from surogate.graph import Type
from surogate.ops.blockwise8 import BLOCK, table
from surogate.optim.adamw import AdamW
from surogate.optim.base import Update, master_of


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """``moments``: of the weights that are too small for blocks."""

    states: ClassVar[tuple[str, ...]] = ("adam_m", "adam_v", "adam_m_absmax", "adam_v_absmax", "master")
    _TABLES: ClassVar[dict[str, bool]] = {"table_signed": True, "table_unsigned": False}

    def kind(self, name: str, shapes: Sequence[tuple[int, ...]]) -> str:
        """``8bit`` or nothing. Weights that are stored together all have to fit: no block spans two of them."""
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
            whole = memory.slot(f"{prefix}:{group.name}")
            blocks = memory.add(f"{prefix}_absmax:{group.name}", Type((whole.type.numel // BLOCK,)), "optimizer")
            if group.sharded:
                for r in range(group.parts):
                    memory.aliases[f"{blocks.name}/{r}"] = blocks
                for weight in group.slots:
                    moment = memory.spread[f"{prefix}.{weight}"]
                    count = memory.slots[weight].type.numel // BLOCK
                    name = f"{prefix}_absmax.{weight}"
                    memory.spread[name] = Spread(blocks.name, moment.first // BLOCK, (count,))
                continue
            if group.parts > 1:
                memory.aliases[blocks.name] = blocks
                memory.cut(blocks.name, group.parts)
            for weight in group.slots:
                slot = memory.slots[f"{prefix}.{weight}"]
                first = (slot.offset - whole.offset) // BLOCK
                memory.parts[f"{prefix}_absmax.{weight}"] = (blocks.name, first, slot.type.numel // BLOCK)
        if master and group.dtype == "bf16":
            same_place(memory, group, "master", "f32", "optimizer")
        for name in self._TABLES:
            if name not in memory.slots:
                memory.add(name, Type((512,)), "optimizer")

    def update_group(self, u: Update, group: Group, salt: int) -> None:
        """One ``adamw_8bit`` over the whole group."""
        if group.kind != "8bit":
            super().update_group(u, group, salt)
            return
        states = ("weight", "grad", "adam_m", "adam_v", "adam_m_absmax", "adam_v_absmax")
        held = [u.state(f"{n}:{group.name}") for n in states]
        tables = [u.constant(name, table(signed)) for name, signed in self._TABLES.items()]
        scalars = [u.state(n) for n in ("lr", "bias_correction1", "bias_correction2", "clip_scale")]
        master = master_of(u, group)
        seed = u.state("seed") if group.dtype == "bf16" and master is None else None
        u.apply(
            "adamw_8bit", held, [*tables, *scalars], master, seed, beta1=self.beta1, beta2=self.beta2,
            eps=self.epsilon, weight_decay=self.decay(group), salt=salt,
        )  # fmt: skip


make = AdamW8bit
