"""Sum over rows: the gradient of a bias."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops.base import Arrays, Attrs, Op, Sample, Types, accumulator, activation, array, expect, typed


class SumRows(Op):
    """dy[...,N], acc[N]? -> out[N] = acc + sum over all rows of dy."""

    name = "sum_rows"
    inplace = {0: 1}
    accumulates = frozenset({0})

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        dy = activation(inputs[0], self, "dy")
        expect(len(dy.shape) >= 1, self, "dy is a scalar")
        out = Type(dy.shape[-1:])
        accumulator(inputs[1], out, self)
        return [out]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        dy = array(inputs[0])
        out = dy.reshape(-1, dy.shape[-1]).sum(0)
        return [out if inputs[1] is None else out + inputs[1]]

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return 64 * 4 * typed(inputs[0], self, "dy").shape[-1]  # kTiles in csrc/cuda/reduce.cu

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([rng.normal(size=(5, 7)), None])
        yield Sample([rng.normal(size=(3, 2, 33)), None])
        yield Sample([rng.normal(size=(300, 1030)), rng.normal(size=1030)], atol=1e-4)
