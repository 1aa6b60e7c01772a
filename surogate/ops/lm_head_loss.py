"""Language-model head and cross-entropy as one op: logits exist for a chunk of tokens at a time, never for all.

Only tokens with a target (>= 0) go through the head, so masked prompts and padding cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import DTYPE_BYTES, Type
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
    typed,
    weight,
)
from surogate.ops.matmul import CUDA_WORKSPACE

# Sizes of csrc/cpu/lm_head_loss.cpp: logits of a chunk, rows of w in a tile, groups of tiles with a dh of their own.
_CHUNK_LOGITS = 1 << 24
_TILE = 512
_GROUPS = 32

# Of csrc/cuda/lm_head_loss.cu: bytes of a chunk's logits, tokens in whole multiples of which chunks are cut, bytes to
# which a row of logits is filled up.
_CUDA_CHUNK = 320 << 20
_CUDA_ROWS = 128
_CUDA_ROW_BYTES = 128


def _chunk_rows(tokens: int, vocabulary: int) -> int:
    """Tokens with a target that go through the head together."""
    return min(tokens, max(64, min(1024, _CHUNK_LOGITS // vocabulary // 32 * 32)))


def _check(op: Op, inputs: Types) -> tuple[Type, Type]:
    h, w, targets = activation(inputs[0], op, "h"), weight(inputs[1], op, "w"), typed(inputs[2], op, "targets")
    expect(len(h.shape) == 2 and len(w.shape) == 2 and h.shape[1] == w.shape[1], op, f"{h} and {w} do not fit")
    expect(targets == Type(h.shape[:1], "i32"), op, f"targets {targets} do not fit {h}")
    return h, w


def _softmax(h: np.ndarray, w: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Rows with a target, their probabilities, and the sum of their losses."""
    rows = np.flatnonzero(targets >= 0)
    logits = h[rows] @ w.T
    logits = logits - logits.max(-1, keepdims=True)
    exp = np.exp(logits)
    total = exp.sum(-1)
    loss = float((np.log(total) - logits[np.arange(len(rows)), targets[rows]]).sum())
    return rows, exp / total[:, None], loss


def _workspace(h: Type, w: Type, threads: int, gradient: bool) -> int:
    tokens, dim = h.shape
    vocabulary = w.shape[0]
    rows = _chunk_rows(tokens, vocabulary)
    tiles = -(-vocabulary // _TILE)
    floats = tiles * rows * _TILE + rows * dim  # logits, gathered h
    floats += 2 * tiles * rows + rows  # a tile's largest logit and sum of exponentials a row; lse
    floats += 0 if w.dtype == "f32" else threads * min(_TILE, vocabulary) * dim  # a tile of w, widened
    floats += min(_GROUPS, tiles) * rows * dim if gradient else 0
    return 8 * rows + 4 * (tokens + floats)  # losses a row; which tokens have a target


def _workspace_cuda(h: Type, w: Type) -> int:
    """Losses, logits of a chunk (stored as h is), and what the matrix products want."""
    row = -(-w.shape[0] * DTYPE_BYTES[h.dtype] // _CUDA_ROW_BYTES) * _CUDA_ROW_BYTES
    rows = min(h.shape[0], max(_CUDA_ROWS, _CUDA_CHUNK // row // _CUDA_ROWS * _CUDA_ROWS))
    return rows * row + 4 * h.shape[0] + CUDA_WORKSPACE + 4 * 256


class LMHeadLoss(Op):
    """h[T,D], w[V,D], targets[T] i32, acc_loss f64[1]? -> loss f64[1], the sum of -log p over tokens with a target.

    p = softmax(h w^T) at the target. A negative target means that there is none; a target >= V is refused.

    It has no gradient rule of its own: autodiff replaces it by ``lm_head_loss_grad``, which gives loss and gradients
    while it has the logits.
    """

    name = "lm_head_loss"
    inplace = {0: 3}
    accumulates = frozenset({0})

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        _check(self, inputs)
        loss = Type((1,), "f64")
        accumulator(inputs[3], loss, self)
        return [loss]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        _, _, loss = _softmax(array(inputs[0]), array(inputs[1]), array(inputs[2]))
        return [np.array([loss]) + (0.0 if inputs[3] is None else inputs[3])]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        """Of a batch in which every token has a target."""
        h, w = _check(self, inputs)
        moved = super().cost(inputs, outputs, attrs).nbytes
        return Cost(2 * h.numel * w.shape[0], moved)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        h, w = _check(self, inputs)
        return _workspace(h, w, threads, gradient=False)

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return _workspace_cuda(*_check(self, inputs))

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for case in _CASES:
            h, w, targets, _ = _sample(rng, *case[:4])
            acc = rng.normal(size=1) if case[4] else None
            yield Sample([h, w, targets, acc], {}, [None, case[5], None, "f64"], rtol=2e-6, atol=2e-5)


class LMHeadLossGrad(Op):
    """h[T,D], w[V,D], targets[T], loss_scale f32[1], acc_loss f64[1]?, acc_dw[V,D]? -> loss f64[1], dh[T,D], dw[V,D].

    loss as :class:`LMHeadLoss` gives it, unscaled; dh and dw are the gradients of loss_scale * loss. dh is 0 for tokens
    without a target. ``need_dw`` false leaves dw out.
    """

    name = "lm_head_loss_grad"
    inplace = {0: 4, 2: 5}
    accumulates = frozenset({0, 2})
    may_reuse = {1: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        h, w = _check(self, inputs)
        loss, dw = Type((1,), "f64"), Type(w.shape)
        expect(inputs[3] == Type((1,)), self, f"loss_scale {inputs[3]} is not f32[1]")
        accumulator(inputs[4], loss, self)
        accumulator(inputs[5], dw, self)
        expect(inputs[5] is None or attrs["need_dw"], self, "acc_dw without need_dw")
        return [loss, h, dw if attrs["need_dw"] else None]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        h, w, targets, scale = (array(x) for x in inputs[:4])
        rows, p, loss = _softmax(h, w, targets)
        p[np.arange(len(rows)), targets[rows]] -= 1.0
        p *= scale[0]
        dh = np.zeros(h.shape)
        dh[rows] = p @ w
        dw = p.T @ h[rows] + (0.0 if inputs[5] is None else inputs[5])
        return [np.array([loss]) + (0.0 if inputs[4] is None else inputs[4]), dh, dw if attrs["need_dw"] else None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        """Of a batch in which every token has a target: logits, dh and perhaps dw, one product each."""
        h, w = _check(self, inputs)
        moved = super().cost(inputs, outputs, attrs).nbytes
        return Cost((3 if attrs["need_dw"] else 2) * 2 * h.numel * w.shape[0], moved)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        h, w = _check(self, inputs)
        return _workspace(h, w, threads, gradient=True)

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return _workspace_cuda(*_check(self, inputs))

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for need_dw in (True, False):
            for case in _CASES:
                h, w, targets, scale = _sample(rng, *case[:4])
                acc_loss = rng.normal(size=1) if case[4] else None
                acc_dw = rng.normal(size=w.shape) if case[4] and need_dw else None
                yield Sample(
                    [h, w, targets, scale, acc_loss, acc_dw],
                    {"need_dw": need_dw},
                    [None, case[5], None, None, "f64", None],
                    rtol=2e-5,
                    atol=2e-5,
                )


# Tokens, dim, vocabulary, share of tokens with a target, accumulate, dtype of w.
_CASES: list[tuple[int, int, int, float, bool, str]] = [
    (7, 5, 11, 0.7, False, "f32"),
    (7, 5, 11, 0.7, True, "f32"),
    (9, 8, 1, 0.9, False, "f32"),
    (6, 8, 30, 0.0, False, "f32"),
    (6, 8, 30, 0.0, True, "f32"),
    (300, 40, 700, 0.6, True, "f32"),
    (300, 40, 1300, 0.6, False, "bf16"),
    (1500, 6, 520, 0.9, True, "bf16"),
]


def _sample(
    rng: np.random.Generator, tokens: int, dim: int, vocabulary: int, share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    targets = rng.integers(0, vocabulary, size=tokens)
    targets[rng.random(tokens) >= share] = -100
    return rng.normal(size=(tokens, dim)), rng.normal(size=(vocabulary, dim)), targets, np.array([0.3])
