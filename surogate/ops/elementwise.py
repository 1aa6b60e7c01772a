"""Sums, products and multiples, element by element. Shapes are equal: nothing is broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Op, Sample, Types, activation, array, expect

_SHAPES = [(5, 7), (3, 2, 33), (1100,)]


class _Binary(Op):
    may_reuse = {0: (0, 1)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        a, b = activation(inputs[0], self, "a"), activation(inputs[1], self, "b")
        expect(a == b, self, f"{a} and {b} do not fit")
        return [a]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in _SHAPES:
            yield Sample([rng.normal(size=shape), rng.normal(size=shape)], differentiable=(0, 1))


class Add(_Binary):
    """a, b -> a + b."""

    name = "add"

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [array(inputs[0]) + array(inputs[1])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        return [d[0] if needs[0] else None, d[0] if needs[1] else None]


class Mul(_Binary):
    """a, b -> a * b."""

    name = "mul"

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [array(inputs[0]) * array(inputs[1])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None:
            return [None, None]
        a, b = node.inputs
        return [g.one("mul", [d[0], b]) if needs[0] else None, g.one("mul", [d[0], a]) if needs[1] else None]


class Scale(Op):
    """x -> alpha * x. Attribute ``alpha``: float."""

    name = "scale"
    cheap = True
    may_reuse = {0: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        return [activation(inputs[0], self, "x")]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [attrs["alpha"] * array(inputs[0])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not needs[0]:
            return [None]
        return [g.one("scale", [d[0]], alpha=node.attrs["alpha"])]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in _SHAPES:
            yield Sample([rng.normal(size=shape)], {"alpha": -1.75}, differentiable=(0,))
