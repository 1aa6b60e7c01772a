"""Root-mean-square layer normalisation (Zhang and Sennrich 2019): y = w * x / sqrt(mean(x^2) + eps)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import (
    Arrays,
    Attrs,
    Cost,
    Op,
    Sample,
    Types,
    accumulator,
    activation,
    array,
    expect,
    f32,
    typed,
    weight,
)

# Rows are summed into this many partial weight gradients whatever the number of threads (kTiles in
# csrc/cpu/rmsnorm.cpp), then the partial sums are added in order.
_TILES = 16


def _cuda_tiles(width: int) -> int:
    """Partial weight gradients that the CUDA kernel makes at most (most_tiles in csrc/cuda/rmsnorm.cu)."""
    return 256 * min(max(1024 // max(width, 1), 1), 4)


def _normalise(x: np.ndarray, w: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    rstd = 1.0 / np.sqrt((x * x).mean(-1) + eps)
    return x * rstd[..., None] * w, rstd


class RMSNorm(Op):
    """x[...,D], w[D] -> y[...,D], rstd[...] = 1/sqrt(mean(x^2) + eps), which the backward pass reads.

    ``w`` is f32 or bf16. Attribute ``eps``: float.
    """

    name = "rmsnorm"
    auxiliary = frozenset({1})
    cheap = True
    may_reuse = {0: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, w = activation(inputs[0], self, "x"), weight(inputs[1], self, "w")
        expect(len(x.shape) >= 1 and w.shape == x.shape[-1:], self, f"weight {w} does not fit {x}")
        return [x, Type(x.shape[:-1])]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return list(_normalise(array(inputs[0]), array(inputs[1]), attrs["eps"]))

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        x, w = node.inputs
        if d[0] is None or not any(needs):
            return [None, None]
        return g.emit("rmsnorm_backward", [d[0], x, w, node.outputs[1], None, None], need_dx=needs[0], need_dw=needs[1])

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(4 * x.numel, 2 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, w_dtype in [((5, 7), "f32"), ((3, 2, 33), "f32"), ((1, 130), "bf16")]:
            yield Sample(
                [rng.normal(size=shape), rng.normal(size=shape[-1])],
                {"eps": 1e-5},
                dtypes=[None, w_dtype],
                differentiable=(0, 1),
            )


class AddRMSNorm(Op):
    """x[...,D], r[...,D], w[D] -> h = x + r, y = rmsnorm(h), rstd[...].

    One pass over memory for the residual stream and its norm. ``w`` is f32 or bf16. Attribute ``eps``: float.
    """

    name = "add_rmsnorm"
    auxiliary = frozenset({2})
    may_reuse = {0: (0, 1), 1: (0, 1)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, r, w = activation(inputs[0], self, "x"), activation(inputs[1], self, "r"), weight(inputs[2], self, "w")
        fits = len(x.shape) >= 1 and x == r and w.shape == x.shape[-1:]
        expect(fits, self, f"{x}, {r} and {w} do not fit")
        return [x, x, Type(x.shape[:-1])]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        h = array(inputs[0]) + array(inputs[1])
        return [h, *_normalise(h, array(inputs[2]), attrs["eps"])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        h, _, rstd = node.outputs
        need_dh, need_dw = needs[0] or needs[1], needs[2]
        dh, dw = d[0], None
        if d[1] is not None and (need_dh or need_dw):
            dx, dw = g.emit(
                "rmsnorm_backward", [d[1], h, node.inputs[2], rstd, None, None], need_dx=need_dh, need_dw=need_dw
            )
            # A plain sum: whether the norm's gradient may be added in place is the fusion pass's business, since
            # others may still read the cotangent of h.
            dh = dx if dh is None or dx is None else g.one("add", [dh, dx])
        return [dh if needs[0] else None, dh if needs[1] else None, dw]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(5 * x.numel, 4 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, w_dtype in [((5, 7), "f32"), ((3, 2, 9), "f32"), ((3, 130), "bf16")]:
            yield Sample(
                [rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape[-1])],
                {"eps": 1e-5},
                dtypes=[None, None, w_dtype],
                differentiable=(0, 1, 2),
            )


class RMSNormBackward(Op):
    """dy, x, w, rstd, acc_dx?, acc_dw? -> dx, dw.

    With n = x*rstd and a = dy*w: dx = rstd * (a - n * mean(a*n)), dw = sum over rows of dy*n.
    Attributes ``need_dx`` and ``need_dw``: a result that is not needed is left out. Gradients are f32 also where ``w``
    is bf16.
    """

    name = "rmsnorm_backward"
    inplace = {0: 4, 1: 5}
    accumulates = frozenset({0, 1})
    may_reuse = {0: (0, 1)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        dy, x, rstd = activation(inputs[0], self, "dy"), activation(inputs[1], self, "x"), f32(inputs[3], self, "rstd")
        w = weight(inputs[2], self, "w")
        fits = dy == x and rstd.shape == x.shape[:-1] and w.shape == x.shape[-1:]
        expect(fits, self, f"{dy}, {x}, {w} and {rstd} do not fit")
        expect(attrs["need_dx"] or attrs["need_dw"], self, "neither result is needed")
        dx, dw = x, Type(w.shape)
        accumulator(inputs[4], dx, self)
        accumulator(inputs[5], dw, self)
        return [dx if attrs["need_dx"] else None, dw if attrs["need_dw"] else None]

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
        return _TILES * 4 * typed(inputs[2], self, "w").numel if attrs["need_dw"] else 0

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        width = typed(inputs[2], self, "w").numel
        return _cuda_tiles(width) * 4 * width if attrs["need_dw"] else 0

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[1], self, "x")
        passes = 2 + (attrs["need_dx"] and 1) + (inputs[4] is not None)
        return Cost((6 * attrs["need_dx"] + 2 * attrs["need_dw"]) * x.numel, passes * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, acc, need_dx, need_dw, w_dtype in [
            ((5, 7), False, True, True, "f32"),
            ((3, 2, 33), False, True, False, "bf16"),
            ((2, 3, 19), False, False, True, "f32"),
            ((300, 13), True, True, True, "f32"),
        ]:
            x, w = rng.normal(size=shape), rng.normal(size=shape[-1])
            _, rstd = _normalise(x, w, 1e-5)
            accs = [rng.normal(size=shape), rng.normal(size=shape[-1])] if acc else [None, None]
            yield Sample(
                [rng.normal(size=shape), x, w, rstd, *accs],
                {"need_dx": need_dx, "need_dw": need_dw},
                dtypes=[None, None, w_dtype, None, None, None],
            )
