"""Root-mean-square layer normalisation (Zhang and Sennrich 2019): y = w * x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, array, expect, typed


def _normalise(x: np.ndarray, w: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    rstd = 1.0 / np.sqrt((x * x).mean(-1) + eps)
    return x * rstd[..., None] * w, rstd


class RMSNorm(Op):
    """x[...,D], w[D] -> y[...,D], rstd[...] (1/sqrt(mean(x^2)+eps), kept for the backward pass)."""

    name = "rmsnorm"
    cheap = True

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, w = typed(inputs[0], self, "x"), typed(inputs[1], self, "w")
        expect(w.shape == x.shape[-1:], self, f"weight {w} does not fit {x}")
        return [x, Type(x.shape[:-1])]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return list(_normalise(array(inputs[0]), array(inputs[1]), attrs["eps"]))

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        x, w = node.inputs
        if d[0] is None:
            return [None, None]
        dx, dw = g.emit(
            "rmsnorm_backward", [d[0], x, w, node.outputs[1], None, None], need_dx=needs[0], need_dw=needs[1]
        )
        return [dx, dw]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(4 * x.numel, 2 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in [(5, 7), (3, 2, 33), (1, 130)]:
            yield Sample(
                [rng.normal(size=shape), rng.normal(size=shape[-1])], {"eps": 1e-5}, differentiable=(0, 1)
            )


class AddRMSNorm(Op):
    """x, r, w -> h = x + r, y = rmsnorm(h), rstd. One pass over memory for the residual stream and its norm."""

    name = "add_rmsnorm"
    may_reuse = {0: (0, 1)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, r, w = (typed(t, self, n) for t, n in zip(inputs, ("x", "r", "w"), strict=True))
        expect(x == r and w.shape == x.shape[-1:], self, f"{x}, {r} and {w} do not fit")
        return [x, x, Type(x.shape[:-1])]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        h = array(inputs[0]) + array(inputs[1])
        return [h, *_normalise(h, array(inputs[2]), attrs["eps"])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        h, _, rstd = node.outputs
        w = node.inputs[2]
        dh, dw = d[0], None
        if d[1] is not None:
            dx, dw = g.emit("rmsnorm_backward", [d[1], h, w, rstd, d[0], None], need_dx=True, need_dw=needs[2])
            dh = dx
        return [dh if needs[0] else None, dh if needs[1] else None, dw]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(5 * x.numel, 4 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in [(5, 7), (3, 130)]:
            yield Sample(
                [rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape[-1])],
                {"eps": 1e-5},
                differentiable=(0, 1, 2),
            )


class RMSNormBackward(Op):
    """dy, x, w, rstd, acc_dx?, acc_dw? -> dx, dw.

    With n = x*rstd and a = dy*w: dx = rstd * (a - n * mean(a*n)), dw = sum over rows of dy*n.
    """

    name = "rmsnorm_backward"
    inplace = {0: 4, 1: 5}
    accumulates = frozenset({0, 1})
    may_reuse = {0: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        dy, x, w, rstd = (typed(inputs[i], self, n) for i, n in enumerate(("dy", "x", "w", "rstd")))
        expect(dy.shape == x.shape and rstd.shape == x.shape[:-1], self, f"{dy}, {x} and {rstd} do not fit")
        return [Type(x.shape) if attrs["need_dx"] else None, Type(w.shape) if attrs["need_dw"] else None]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        dy, x, w, rstd = (array(inputs[i]) for i in range(4))
        n = x * rstd[..., None]
        a = dy * w
        dx = rstd[..., None] * (a - n * (a * n).mean(-1, keepdims=True))
        dw = (dy * n).reshape(-1, x.shape[-1]).sum(0)
        if inputs[4] is not None:
            dx = dx + inputs[4]
        if inputs[5] is not None:
            dw = dw + inputs[5]
        return [dx if attrs["need_dx"] else None, dw if attrs["need_dw"] else None]

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        # Partial weight gradients, one row for every fixed tile of rows (see csrc/cpu/rmsnorm.cpp).
        return 0 if not attrs["need_dw"] else 16 * 4 * typed(inputs[2], self, "w").numel

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[1], self, "x")
        return Cost(8 * x.numel, 3 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, acc, need_dw in [((5, 7), False, True), ((3, 2, 33), False, True), ((300, 13), True, True)]:
            x, w = rng.normal(size=shape), rng.normal(size=shape[-1])
            _, rstd = _normalise(x, w, 1e-5)
            accs = [rng.normal(size=shape), rng.normal(size=shape[-1])] if acc else [None, None]
            yield Sample([rng.normal(size=shape), x, w, rstd, *accs], {"need_dx": True, "need_dw": need_dw})
