"""SwiGLU (Shazeer 2020): the gate of Llama-style feed-forward blocks, silu(g) * u."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.activations import sigmoid
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, typed

_SHAPES = [(5, 7), (3, 2, 33), (9, 1030)]


class SwiGLU(Op):
    """g, u -> silu(g) * u, any shape."""

    name = "swiglu"
    cheap = True
    may_reuse = {0: (0, 1)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        gate, up = activation(inputs[0], self, "g"), activation(inputs[1], self, "u")
        expect(gate == up, self, f"{gate} and {up} do not fit")
        return [gate]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        gate, up = array(inputs[0]), array(inputs[1])
        return [gate * sigmoid(gate) * up]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not any(needs):
            return [None, None]
        dg, du = g.emit("swiglu_backward", [d[0], *node.inputs])
        return [dg if needs[0] else None, du if needs[1] else None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        gate = typed(inputs[0], self, "g")
        return Cost(11 * gate.numel, 3 * gate.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in _SHAPES:
            yield Sample([3 * rng.normal(size=shape), rng.normal(size=shape)], differentiable=(0, 1))


class SwiGLUBackward(Op):
    """dy, g, u -> dg = dy * u * silu'(g), du = dy * silu(g)."""

    name = "swiglu_backward"
    may_reuse = {0: (0, 1, 2), 1: (0, 1, 2)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        dy, gate, up = (activation(inputs[i], self, n) for i, n in enumerate(("dy", "g", "u")))
        expect(dy == gate == up, self, f"{dy}, {gate} and {up} do not fit")
        return [gate, up]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        dy, gate, up = (array(inputs[i]) for i in range(3))
        s = sigmoid(gate)
        return [dy * up * s * (1.0 + gate * (1.0 - s)), dy * gate * s]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        gate = typed(inputs[1], self, "g")
        return Cost(17 * gate.numel, 5 * gate.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in _SHAPES:
            yield Sample([rng.normal(size=shape), 3 * rng.normal(size=shape), rng.normal(size=shape)])
