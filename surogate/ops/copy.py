"""Constants, and copies between layouts, dtypes and spaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import DTYPE_BYTES, Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, expect, typed

_FLOATING = ("f32", "f64", "bf16")


class Fill(Op):
    """-> y, every element ``value``. Attributes ``value``: number; ``shape``: tuple of int; ``dtype``: str."""

    name = "fill"
    cheap = True

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        expect(len(inputs) == 0, self, "takes no operands")
        expect(attrs["dtype"] in DTYPE_BYTES, self, f"there is no dtype {attrs['dtype']}")
        return [Type(tuple(attrs["shape"]), attrs["dtype"])]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [np.full(attrs["shape"], attrs["value"], np.float64 if attrs["dtype"] in _FLOATING else np.int64)]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        return []

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        return Cost(0, typed(outputs[0], self, "y").nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([], {"value": -1.5, "shape": (5, 7), "dtype": "f32"})
        yield Sample([], {"value": 0.0, "shape": (3, 2, 33), "dtype": "f32"})
        yield Sample([], {"value": 2.0, "shape": (1,), "dtype": "f64"})


class Copy(Op):
    """x -> y, the same values in storage of its own. Attribute ``dtype``: str, optional; the dtype of y.

    Narrowing to bf16 rounds to nearest, ties to even. The cotangent passes through: cotangents are f32 whatever the
    storage of the value.
    """

    name = "copy"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x = typed(inputs[0], self, "x")
        dtype = attrs.get("dtype", x.dtype)
        both_floating = x.dtype in _FLOATING and dtype in _FLOATING
        expect(dtype == x.dtype or both_floating, self, f"cannot turn {x} into {dtype}")
        return [Type(x.shape, dtype)]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [np.array(inputs[0])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        return [d[0] if needs[0] else None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        return Cost(0, typed(inputs[0], self, "x").nbytes + typed(outputs[0], self, "y").nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([rng.normal(size=(5, 7))], differentiable=(0,))
        yield Sample([rng.normal(size=(3, 2, 33))], {"dtype": "f32"}, dtypes=["bf16"])
        yield Sample([rng.normal(size=(4, 9))], {"dtype": "bf16"}, rtol=2.0**-8)
        yield Sample([rng.integers(-9, 9, size=11)])
