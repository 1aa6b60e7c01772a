"""Causal attention inside documents, by blocks with an online softmax, and its backward pass (Dao 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, f32, typed

# Block sizes and item sizes of csrc/cpu/attention.cpp.
_QUERIES = 64
_KEYS_FORWARD = 256
_KEYS_BACKWARD = 128
_ITEM_BYTES = 32

# Of csrc/cuda/attention.cu: distances between tokens that may differ; major compute capabilities whose backward pass
# wants statistics padded to documents x length.
_CUDA_OFFSETS = 8
_PADDED_STATISTICS = (8, 12)


def _check(op: Op, inputs: Types, attrs: Attrs) -> tuple[Type, Type]:
    """Types of q and k, of inputs that begin with q, k, v and cu_seqlens."""
    q, k, v = (activation(inputs[i], op, name) for i, name in enumerate("qkv"))
    cu = typed(inputs[3], op, "cu_seqlens")
    expect(len(q.shape) == 3 and len(k.shape) == 3, op, f"{q} and {k} are not [tokens, heads, head_dim]")
    fits = k == v and q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
    expect(fits, op, f"{q}, {k} and {v} do not fit")
    boundaries = cu.dtype == "i32" and len(cu.shape) == 1 and cu.shape[0] >= 2
    expect(boundaries, op, f"cu_seqlens {cu} is not i32[documents+1]")
    expect(attrs["window"] >= 0, op, f"window {attrs['window']} is negative")
    return q, k


def _documents(cu_seqlens: np.ndarray) -> Iterator[slice]:
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        if end > begin:
            yield slice(int(begin), int(end))


def _scores(q: np.ndarray, k: np.ndarray, attrs: Attrs) -> np.ndarray:
    """[H,L,L] of one document; -inf where a query does not see a key."""
    s = attrs["scale"] * np.einsum("ihc,jhc->hij", q, k)
    distance = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    hidden = (distance < 0) | ((distance >= attrs["window"]) & (attrs["window"] > 0))
    return np.where(hidden, -np.inf, s)


def _pairs(tokens: int, window: int) -> int:
    """(query, key) pairs that see each other, were all tokens one document: what a pack of documents cannot exceed."""
    w = min(window or tokens, tokens)
    return w * (w + 1) // 2 + (tokens - w) * w


# Major compute capabilities on which cuDNN's backward pass of packed attention has no form that repeats its bits.
NO_DETERMINISTIC_BACKWARD = (8, 12)


def _cuda_length(q: Type, attrs: Attrs) -> int:
    return max(attrs.get("max_length") or q.shape[0], 2)


def _cuda_common(q: Type, cu: Type, attrs: Attrs, sm: int) -> int:
    """Of both passes (csrc/cuda/attention.cu): offsets and lengths of documents, padded statistics where the
    architecture wants them, and what cuDNN asks for besides, which was seen to grow with the documents."""
    documents = cu.shape[0] - 1
    offsets = _CUDA_OFFSETS * (8 * (documents + 1) + 256)
    padded = sm // 10 in _PADDED_STATISTICS
    statistics = 4 * documents * q.shape[1] * _cuda_length(q, attrs) + 256 if padded else 0
    return offsets + statistics + 4 * documents + 2 * 256 + (1 << 20) + 1024 * documents


class Attention(Op):
    """q[T,H,C], k[T,K,C], v[T,K,C], cu_seqlens[S+1] -> o[T,H,C], lse[H,T].

    Token i sees token j of its own document when 0 <= i-j, and i-j < ``window`` unless window is 0. ``scale``
    multiplies q.k. Query head h reads key head h // (H/K). Documents are runs between neighbouring boundaries; the
    boundaries begin with 0, do not fall and end with T, so that trailing documents of length 0 pad them. ``lse`` is the
    logarithm of the sum of exponentials of a query's scores, which the backward pass reads; a GPU may lay it out as
    [T,H] in the same memory.

    Optional attributes, which pass on to the backward pass: ``max_length``, the most tokens that a document can have (a
    GPU's launch grows with it; left out: T), and ``deterministic``, whether the backward pass must give the same bits
    every time on a GPU too (elsewhere it does anyway).
    """

    name = "attention"
    auxiliary = frozenset({1})
    may_reuse = {0: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        q, _ = _check(self, inputs, attrs)
        return [q, Type((q.shape[1], q.shape[0]))]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        q, k, v, cu = (array(x) for x in inputs)
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        o, lse = np.zeros(q.shape), np.zeros((q.shape[1], q.shape[0]))
        for doc in _documents(cu):
            s = _scores(q[doc], k[doc], attrs)
            top = s.max(-1, keepdims=True)
            p = np.exp(s - top)
            total = p.sum(-1, keepdims=True)
            o[doc] = np.einsum("hij,jhc->ihc", p / total, v[doc])
            lse[:, doc] = (top + np.log(total))[..., 0]
        return [o, lse]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None:
            return [None] * 4
        q, k, v, cu = node.inputs
        grads = g.emit("attention_backward", [d[0], q, k, v, *node.outputs, cu], **node.attrs)
        return [x if need else None for x, need in zip([*grads, None], needs, strict=True)]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        """An upper bound, exact for one document of T tokens: two products a (query, key) pair."""
        q = activation(inputs[0], self, "q")
        tokens, heads, dim = q.shape
        moved = super().cost(inputs, outputs, attrs).nbytes
        return Cost(2 * 2 * _pairs(tokens, attrs["window"]) * heads * dim, moved)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        """A thread: scores and result of a block. Besides: the list of blocks."""
        q, cu = activation(inputs[0], self, "q"), typed(inputs[3], self, "cu_seqlens")
        blocks = q.shape[0] // _QUERIES + cu.shape[0]
        return threads * 4 * _QUERIES * (_KEYS_FORWARD + q.shape[2]) + blocks * _ITEM_BYTES

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        q, _ = _check(self, inputs, attrs)
        if q.dtype != "bf16":
            return 0
        return _cuda_common(q, typed(inputs[3], self, "cu_seqlens"), attrs, sm)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for boundaries, heads, kv_heads, dim, window in _CASES:
            inputs, attrs = _sample(rng, boundaries, heads, kv_heads, dim, window)
            yield Sample([*inputs], attrs, differentiable=(0, 1, 2) if boundaries[-1] < 30 else ())


class AttentionBackward(Op):
    """do[T,H,C], q, k, v, o, lse[H,T], cu_seqlens -> dq[T,H,C], dk[T,K,C], dv[T,K,C].

    Probabilities are recomputed from lse: P = exp(scale q.k - lse), dV = P^T dO, dP = dO V^T,
    dS = P * (dP - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q; dK and dV are summed over the query heads of a
    key head.
    """

    name = "attention_backward"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        q, k = _check(self, [*inputs[1:4], inputs[6]], attrs)
        do, o, lse = activation(inputs[0], self, "do"), activation(inputs[4], self, "o"), f32(inputs[5], self, "lse")
        fits = do == q and o == q and lse.shape == (q.shape[1], q.shape[0])
        expect(fits, self, f"{do}, {o} and {lse} do not fit {q}")
        return [q, k, k]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        do, q, k, v, o, lse, cu = (array(x) for x in inputs)
        kv_shape, group = k.shape, q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(k.shape)
        delta = np.einsum("ihc,ihc->hi", do, o)
        for doc in _documents(cu):
            p = np.exp(_scores(q[doc], k[doc], attrs) - lse[:, doc, None])
            dp = np.einsum("ihc,jhc->hij", do[doc], v[doc])
            ds = attrs["scale"] * p * (dp - delta[:, doc, None])
            dq[doc] = np.einsum("hij,jhc->ihc", ds, k[doc])
            dk[doc] = np.einsum("hij,ihc->jhc", ds, q[doc])
            dv[doc] = np.einsum("hij,ihc->jhc", p, do[doc])
        shape = (kv_shape[0], kv_shape[1], group, kv_shape[2])
        return [dq, dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        """An upper bound, exact for one document of T tokens: five products a (query, key) pair."""
        q = activation(inputs[1], self, "q")
        tokens, heads, dim = q.shape
        moved = super().cost(inputs, outputs, attrs).nbytes
        return Cost(5 * 2 * _pairs(tokens, attrs["window"]) * heads * dim, moved)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        """A thread: P and dP of a block. Besides: rowsum(dO * O) and the list of work items."""
        q, k = activation(inputs[1], self, "q"), activation(inputs[2], self, "k")
        cu = typed(inputs[6], self, "cu_seqlens")
        items = q.shape[0] // _QUERIES + q.shape[0] // _KEYS_BACKWARD + 3 * cu.shape[0]
        scratch = threads * 4 * _QUERIES * 2 * _KEYS_BACKWARD
        return scratch + 4 * q.shape[0] * q.shape[1] + items * k.shape[1] * _ITEM_BYTES + 8 * threads

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        """cuDNN's, by what its frontend asks for: dQ in f32 (or, to be deterministic, dP whole), dK and dV of every
        query head, rowsum(dO * O); and dense dK and dV where the results are windows."""
        q, k = _check(self, [*inputs[1:4], inputs[6]], attrs)
        cu = typed(inputs[6], self, "cu_seqlens")
        if q.dtype != "bf16":
            return 0
        tokens, heads, dim = q.shape
        kv_heads, documents, length = k.shape[1], cu.shape[0] - 1, _cuda_length(q, attrs)
        packed = dim % 16 == 0 and sm // 10 not in _PADDED_STATISTICS
        rows = tokens if packed else documents * length
        if attrs.get("deterministic", False):
            scores = 2 * documents * heads * (-(-length // 64) * 64) * (-(-length // 128) * 128)
        else:
            scores = 4 * rows * (heads + 2 * kv_heads) * dim  # dq may be a window of packed gradients
        grouped = 0 if heads == kv_heads else 2 * 4 * rows * heads * dim + 2 * (2 * tokens * kv_heads * dim + 256)
        return scores + grouped + 4 * rows * heads + _cuda_common(q, cu, attrs, sm)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for boundaries, heads, kv_heads, dim, window in _CASES:
            (q, k, v, cu), attrs = _sample(rng, boundaries, heads, kv_heads, dim, window)
            o, lse = Attention().reference([q, k, v, cu], attrs)
            yield Sample([rng.normal(size=q.shape), q, k, v, o, lse, cu], attrs, rtol=1e-4, atol=5e-5)


# Boundaries, heads, key heads, head_dim, window.
_CASES: list[tuple[list[int], int, int, int, int]] = [
    ([0, 1], 1, 1, 4, 0),
    ([0, 7, 11, 12, 20, 20, 20], 4, 2, 8, 0),
    ([0, 0, 13, 21, 21], 3, 1, 6, 4),
    ([0, 9, 25], 2, 2, 5, 1),
    ([0, 64, 65, 193, 333], 3, 1, 16, 0),
    ([0, 550], 2, 1, 64, 0),
    ([0, 300, 420, 420], 4, 2, 16, 100),
    ([0, 400], 1, 1, 16, 64),
    ([0, 90, 170], 2, 2, 128, 0),
]


def _sample(
    rng: np.random.Generator, boundaries: list[int], heads: int, kv_heads: int, dim: int, window: int
) -> tuple[list[np.ndarray], dict[str, float | int]]:
    tokens = boundaries[-1]
    q, k, v = (rng.normal(size=(tokens, h, dim)) for h in (heads, kv_heads, kv_heads))
    return [q, k, v, np.array(boundaries)], {"scale": dim**-0.5, "window": window}
