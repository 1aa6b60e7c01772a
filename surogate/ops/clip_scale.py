"""Gradient clipping by global norm (Pascanu et al. 2013): the factor, which the optimizer applies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops.base import Arrays, Attrs, Op, Sample, Types, array, expect, typed


class ClipScale(Op):
    """sumsq f64[1] -> norm f32[1] = sqrt(sumsq), scale f32[1] = min(1, max_norm / (norm + 1e-6)).

    As ``torch.nn.utils.clip_grad_norm_`` has it. Attribute ``max_norm``: float; 0 means no clipping (scale 1). A norm
    that is not a number gives a scale that is not one either: a broken gradient is never hidden.
    """

    name = "clip_scale"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        sumsq = typed(inputs[0], self, "sumsq")
        expect(sumsq == Type((1,), "f64"), self, f"sumsq is {sumsq}, not f64[1]")
        expect(attrs["max_norm"] >= 0.0, self, f"max_norm is {attrs['max_norm']}, below 0")
        return [Type((1,)), Type((1,))]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        norm = np.sqrt(array(inputs[0]))
        if attrs["max_norm"] == 0.0:
            return [norm, np.ones(1)]
        return [norm, np.minimum(1.0, attrs["max_norm"] / (norm + 1e-6))]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for sumsq, max_norm in [(16.5, 1.0), (0.25, 1.0), (0.0, 1.0), (9.0, 0.0)]:
            yield Sample([np.array([sumsq])], {"max_norm": max_norm}, dtypes=["f64"])
