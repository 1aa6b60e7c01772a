"""Collectives: what ranks do together. For one rank alone, which the references describe, they change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from surogate.graph import Type
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, array, expect, typed


class _Collective(Op):
    """x -> y in the storage of x, on all ranks at once."""

    inplace = {0: 0}
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "f64")

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x = typed(inputs[0], self, "x")
        expect(x.dtype in self.dtypes, self, f"x is {x}, not of {' or '.join(self.dtypes)}")
        return [x]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [array(inputs[0])]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        return Cost(0, 2 * typed(inputs[0], self, "x").nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([rng.normal(size=(4, 33))], {"root": 0} if self.name == "broadcast" else {})


class AllReduce(_Collective):
    """y = sum of x over the ranks, in their order: the same bits on every rank."""

    name = "all_reduce"


class ReduceScatter(_Collective):
    """Part r of y on rank r = that part of the sum of x over the ranks; other parts are not defined.

    A part is the r-th of as many equal ones as there are ranks.
    """

    name = "reduce_scatter"


class AllGather(_Collective):
    """Part r of y on every rank = part r of x on rank r."""

    name = "all_gather"
    dtypes = ("f32", "f64", "bf16", "u8", "i32", "i64")


class Broadcast(_Collective):
    """y = x of rank ``root`` (int)."""

    name = "broadcast"
    dtypes = AllGather.dtypes


COLLECTIVES = frozenset(op.name for op in (AllReduce, ReduceScatter, AllGather, Broadcast))
