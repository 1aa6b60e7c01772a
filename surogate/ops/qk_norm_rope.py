"""RMSNorm of each head of q and k and their rotary embedding in one pass, as Qwen3 has them before attention.

The fusion pass makes it of ``rmsnorm`` and ``rope``: q and k are read and written once instead of twice. The root mean
square is computed again in the backward pass, which reads q and k anyway.
"""

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

# Partial weight gradients: kTiles of csrc/cpu/qk_norm_rope.cpp, and of csrc/cuda/qk_norm_rope.cu for each of q and k.
_TILES = 16
_TILES_CUDA = 512
MOST_DIM = 256  # head sizes that the kernels take


def _check(op: Op, inputs: Types) -> tuple[Type, Type]:
    """Types of q and k, after a check of q, k, wq, wk, cos, sin."""
    q, k = activation(inputs[0], op, "q"), activation(inputs[1], op, "k")
    heads = len(q.shape) == len(k.shape) == 3 and q.dtype == k.dtype
    expect(heads and q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2], op, f"{q} and {k} do not fit")
    dim = q.shape[2]
    expect(dim % 2 == 0 and dim <= MOST_DIM, op, f"heads of {dim}, not an even number up to {MOST_DIM}")
    for index, name in ((2, "wq"), (3, "wk")):
        w = weight(inputs[index], op, name)
        expect(w.shape == (dim,), op, f"{name} {w} does not fit {q}")
    cos, sin = f32(inputs[4], op, "cos"), f32(inputs[5], op, "sin")
    expect(cos == sin and cos.shape == (q.shape[0], dim // 2), op, f"{cos} and {sin} do not fit {q}")
    return q, k


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    x1, x2 = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def _rstd(x: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


class QKNormRope(Op):
    """q[T,H,C], k[T,K,C], wq[C], wk[C], cos[T,C/2], sin[T,C/2] -> q', k', each rope(rmsnorm(x, w), cos, sin).

    C is even and at most 256; weights are f32 or bf16. Attribute ``eps``: float. What lies between norm and rotation is
    never rounded.
    """

    name = "qk_norm_rope"
    cheap = True
    may_reuse = {0: (0,), 1: (1,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        return [*_check(self, inputs)]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        q, k, wq, wk, cos, sin = (array(x) for x in inputs)
        return [_rotate(x * _rstd(x, attrs["eps"]) * w, cos, sin) for x, w in ((q, wq), (k, wk))]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        none: list[Value | None] = [None] * len(node.inputs)
        if not any(needs) or (d[0] is None and d[1] is None):
            return none
        # A result that nothing reads has a cotangent of zeros.
        for index in (0, 1):
            out = node.outputs[index]
            assert out is not None
            if d[index] is None:
                zeros = g.one("fill", [], value=0.0, shape=out.shape, dtype=out.dtype)
                d = [zeros if i == index else x for i, x in enumerate(d)]
        attrs = {"eps": node.attrs["eps"], "need_dx": needs[0] or needs[1], "need_dw": needs[2] or needs[3]}
        found = g.emit("qk_norm_rope_backward", [*d, *node.inputs, None, None], **attrs)
        return [x if need else None for x, need in zip([*found, None, None], needs, strict=True)]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        q, k = _check(self, inputs)
        tables = 2 * typed(inputs[4], self, "cos").nbytes
        return Cost(7 * (q.numel + k.numel), 2 * (q.nbytes + k.nbytes) + tables)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for tokens, heads, kv_heads, dim, dtype in _CASES:
            inputs = _sample(rng, tokens, heads, kv_heads, dim)
            dtypes = [None, None, dtype, dtype, None, None]
            yield Sample(inputs, {"eps": 1e-6}, dtypes, differentiable=(0, 1, 2, 3) if tokens < 10 else ())


class QKNormRopeBackward(Op):
    """dq', dk', q, k, wq, wk, cos, sin, acc_dwq?, acc_dwk? -> dq, dk, dwq, dwk.

    With g = dy rotated back, n = x * rstd and a = g * w: dx = rstd * (a - n * mean(a n)), dw = sum of g * n over tokens
    and heads. Attributes ``eps``, and ``need_dx`` and ``need_dw``: results that are not needed are left out. dw is f32.
    """

    name = "qk_norm_rope_backward"
    inplace = {2: 8, 3: 9}
    accumulates = frozenset({2, 3})
    may_reuse = {0: (0,), 1: (1,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        q, k = _check(self, inputs[2:8])
        expect(inputs[0] == q and inputs[1] == k, self, f"{inputs[0]} and {inputs[1]} do not fit {q} and {k}")
        expect(attrs["need_dx"] or attrs["need_dw"], self, "no result is needed")
        dw = Type((q.shape[2],))
        for index in (8, 9):
            accumulator(inputs[index], dw, self)
            expect(inputs[index] is None or attrs["need_dw"], self, "an accumulator without need_dw")
        return [*((q, k) if attrs["need_dx"] else (None, None)), *((dw, dw) if attrs["need_dw"] else (None, None))]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        dq, dk, q, k, wq, wk, cos, sin = (array(x) for x in inputs[:8])
        dxs: list[np.ndarray | None] = []
        dws: list[np.ndarray | None] = []
        for dy, x, w, acc in ((dq, q, wq, inputs[8]), (dk, k, wk, inputs[9])):
            g, rstd = _rotate(dy, cos, -sin), _rstd(x, attrs["eps"])
            n, a = x * rstd, g * w
            dx = rstd * (a - n * (a * n).mean(-1, keepdims=True))
            dw = (g * n).sum((0, 1)) + (0.0 if acc is None else acc)
            dxs.append(dx if attrs["need_dx"] else None)
            dws.append(dw if attrs["need_dw"] else None)
        return [*dxs, *dws]

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        return 2 * _TILES * 4 * typed(inputs[4], self, "wq").numel if attrs["need_dw"] else 0

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return 2 * _TILES_CUDA * 4 * typed(inputs[4], self, "wq").numel if attrs["need_dw"] else 0

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        q, k = _check(self, inputs[2:8])
        tables = 2 * typed(inputs[6], self, "cos").nbytes
        passes = 2 + bool(attrs["need_dx"])
        flops = (11 + 2 * bool(attrs["need_dw"])) * (q.numel + k.numel)
        return Cost(flops, passes * (q.nbytes + k.nbytes) + tables)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        wanted = [(True, True, True), (True, False, False), (False, True, False), (True, True, False)]
        for index, (tokens, heads, kv_heads, dim, dtype) in enumerate(_CASES):
            need_dx, need_dw, acc = wanted[index % len(wanted)]
            inputs = _sample(rng, tokens, heads, kv_heads, dim)
            grads = [rng.normal(size=(tokens, h, dim)) for h in (heads, kv_heads)]
            accs = [rng.normal(size=dim) if acc else None for _ in range(2)]
            attrs = {"eps": 1e-6, "need_dx": need_dx, "need_dw": need_dw}
            dtypes = [None] * 4 + [dtype, dtype] + [None] * 4
            yield Sample([*grads, *inputs, *accs], attrs, dtypes, atol=2e-5 if tokens < 100 else 2e-4)


# Tokens, heads, key heads, head_dim, dtype of the weights.
_CASES: list[tuple[int, int, int, int, str]] = [
    (5, 3, 1, 10, "f32"),
    (7, 2, 2, 6, "bf16"),
    (9, 4, 2, 32, "f32"),
    (40, 5, 2, 64, "bf16"),
    (333, 6, 3, 128, "f32"),
    (21, 3, 1, 80, "bf16"),
    (17, 2, 1, 256, "f32"),
]


def _sample(rng: np.random.Generator, tokens: int, heads: int, kv_heads: int, dim: int) -> list[np.ndarray | None]:
    angle = rng.uniform(0, 6, size=(tokens, dim // 2))
    q, k = (rng.normal(size=(tokens, h, dim)) for h in (heads, kv_heads))
    return [q, k, 1 + rng.normal(size=dim), 1 + rng.normal(size=dim), np.cos(angle), np.sin(angle)]
