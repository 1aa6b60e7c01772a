"""Inverted dropout (Srivastava et al. 2014) whose mask is computed, never stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, typed
from surogate.ops.philox import random_words


class Dropout(Op):
    """x, seed[1] i64 -> x / (1 - p) where the element's uniform number is at least ``p``, else 0; any shape.

    The uniform number is word * 2^-32, the word being that of :func:`surogate.ops.philox.random_words` for the
    element's row-major index. Attributes ``p``: float in [0, 1); ``salt``: int, different for every dropout of a
    program. The gradient is the same dropout of the cotangent.
    """

    name = "dropout"
    cheap = True
    may_reuse = {0: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, seed = activation(inputs[0], self, "x"), typed(inputs[1], self, "seed")
        expect(seed == Type((1,), "i64"), self, f"seed is {seed}, not i64[1]")
        expect(0.0 <= attrs["p"] < 1.0, self, f"p is {attrs['p']}, not in [0, 1)")
        return [x]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        x, p = array(inputs[0]), attrs["p"]
        words = random_words(x.size, int(array(inputs[1])[0]), attrs["salt"]).reshape(x.shape)
        keep = words >= math.ceil(p * 2.0**32)
        return [np.where(keep, x / (1.0 - p), 0.0)]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not needs[0]:
            return [None, None]
        return [g.one("dropout", [d[0], node.inputs[1]], **node.attrs), None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(25 * x.numel, 2 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, seed, p, salt in [((5, 7), 0, 0.1, 0), ((3, 2, 33), -12345678901, 0.5, 3), ((9, 1030), 7, 0.0, 1)]:
            yield Sample(
                [rng.normal(size=shape), np.array([seed])],
                {"p": p, "salt": salt},
                dtypes=[None, "i64"],
                differentiable=(0,),
            )
