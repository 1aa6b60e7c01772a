"""Sum of squares: the norm of the gradients, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, accumulator, array, f32, typed

# Elements are summed in float64 in tiles of at most this size whatever the number of threads (kTileElements in
# csrc/cpu/parallel.h), then the tiles' sums are added in order.
_TILE = 1 << 14


class SumSquares(Op):
    """x, acc f64[1]? -> f64[1] = acc + sum of x^2; any shape."""

    name = "sum_squares"
    inplace = {0: 1}
    accumulates = frozenset({0})

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        f32(inputs[0], self, "x")
        out = Type((1,), "f64")
        accumulator(inputs[1], out, self)
        return [out]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        x = array(inputs[0])
        out = np.array([(x * x).sum()])
        return [out if inputs[1] is None else out + inputs[1]]

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        # Where rows are not dense a tile is a part of one row or whole rows, at worst little more than half full.
        return 8 * (2 * typed(inputs[0], self, "x").numel // _TILE + 1)

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return 8 * 1024  # kBlocks in csrc/cuda/reduce.cu

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(2 * x.numel, x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, acc in [((7,), False), ((3, 2, 33), True), ((70, 1030), False), ((3, 20_000), True)]:
            yield Sample(
                [rng.normal(size=shape), rng.uniform(0, 9, 1) if acc else None], dtypes=[None, "f64" if acc else None]
            )
