"""The matrix product of linear layers and of their gradients: y = alpha * op(a) op(b) + bias + c."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, weight

# A bf16 operand is widened strip by strip: so many elements at most, in whole multiples of so many columns of y
# (kStripElements and kStripColumns in csrc/cpu/gemm.h).
_STRIP_ELEMENTS = 1 << 24
_STRIP_COLUMNS = 512

# What cuBLASLt may use on a GPU, alignment included: NVIDIA's advice for Hopper, and enough to split long sums.
CUDA_WORKSPACE = (32 << 20) + 256


class MatMul(Op):
    """a, b, bias[N]?, c[M,N]? -> y[M,N] = alpha * op(a) op(b) + bias + c, which takes c's storage.

    ``ta``: a is stored as [K,M], else [M,K]. ``tb``: b is stored as [N,K] (a linear layer's weight), else [K,N].
    Each operand is f32 or bf16 (on the CPU a, c and y are f32). ``alpha`` multiplies the product alone. Attribute
    ``dtype``: of y and c; that of a if left out.
    """

    name = "matmul"
    inplace = {0: 3}
    accumulates = frozenset({0})

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        a, b = activation(inputs[0], self, "a"), weight(inputs[1], self, "b")
        expect(len(a.shape) == 2 and len(b.shape) == 2, self, f"{a} and {b} are not matrices")
        m, k = a.shape[::-1] if attrs["ta"] else a.shape
        k_of_b, n = b.shape[::-1] if attrs["tb"] else b.shape
        expect(k == k_of_b, self, f"{a} and {b} do not fit (ta={attrs['ta']}, tb={attrs['tb']})")
        y = Type((m, n), attrs.get("dtype", a.dtype))
        if inputs[2] is not None:
            expect(weight(inputs[2], self, "bias").shape == (n,), self, f"bias {inputs[2]} does not fit {y}")
        expect(inputs[3] is None or inputs[3] == y, self, f"c {inputs[3]} does not fit {y}")
        return [y]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        a, b = array(inputs[0]), array(inputs[1])
        y = attrs["alpha"] * ((a.T if attrs["ta"] else a) @ (b.T if attrs["tb"] else b))
        for term in inputs[2:]:
            if term is not None:
                y = y + term
        return [y]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        a, b, _, _ = node.inputs
        dy, ta, tb, alpha = d[0], node.attrs["ta"], node.attrs["tb"], node.attrs["alpha"]
        if dy is None:
            return [None] * 4

        def product(x: Value | None, y: Value | None, tx: bool, ty: bool, of: Value | None) -> Value:
            # Gradients of weights are f32 whatever the activations are: small ones add up over micro-batches.
            assert x is not None and of is not None
            dtype = "f32" if of.kind == "param" else of.dtype
            told = {} if dtype == x.dtype else {"dtype": dtype}
            return g.one("matmul", [x, y, None, None], ta=tx, tb=ty, alpha=alpha, **told)

        da = db = dbias = None
        if needs[0]:  # op(a)' = dy op(b)^T, stored as a is
            da = product(b, dy, tb, True, a) if ta else product(dy, b, False, not tb, a)
        if needs[1]:  # op(b)' = op(a)^T dy, stored as b is
            db = product(dy, a, True, ta, b) if tb else product(a, dy, not ta, False, b)
        if needs[2]:
            dbias = g.one("sum_rows", [dy, None])
        return [da, db, dbias, dy if needs[3] else None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        a, y = activation(inputs[0], self, "a"), activation(outputs[0], self, "y")
        k = a.shape[0] if attrs["ta"] else a.shape[1]
        moved = super().cost(inputs, outputs, attrs).nbytes
        return Cost(2 * y.numel * k + y.numel * sum(t is not None for t in inputs[2:]), moved)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        """A strip of b in f32, where b is stored as bf16."""
        b = weight(inputs[1], self, "b")
        if b.dtype == "f32":
            return 0
        k, n = b.shape[::-1] if attrs["tb"] else b.shape
        columns = max(1, _STRIP_ELEMENTS // (max(k, 1) * _STRIP_COLUMNS)) * _STRIP_COLUMNS
        return 4 * k * min(n, columns)

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return CUDA_WORKSPACE

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        def sample(m: int, n: int, k: int, ta: bool, tb: bool, bias: bool, c: bool, alpha: float, bf16: bool) -> Sample:
            inputs = [
                rng.normal(size=(k, m) if ta else (m, k)),
                rng.normal(size=(n, k) if tb else (k, n)),
                rng.normal(size=n) if bias else None,
                rng.normal(size=(m, n)) if c else None,
            ]
            dtypes = [None, "bf16", "bf16", None] if bf16 else None
            there = tuple(i for i, x in enumerate(inputs) if x is not None and m * n * k < 5000 and not (ta and bf16))
            return Sample(inputs, {"ta": ta, "tb": tb, "alpha": alpha}, dtypes, there, rtol=2e-5, atol=1e-4)

        for ta in (False, True):
            for tb in (False, True):
                yield sample(13, 7, 19, ta, tb, False, False, 1.0, False)
                yield sample(13, 7, 19, ta, tb, True, True, -0.5, False)
                yield sample(37, 530, 65, ta, tb, False, True, 1.0, True)
                yield sample(300, 200, 70, ta, tb, False, True, 1.0, False)
        yield sample(70, 16, 130, False, True, False, False, 1.0, False)  # down to LoRA's rank
        yield sample(70, 130, 16, False, True, True, True, 2.0, False)  # and up from it
        yield sample(16, 130, 300, True, False, False, True, 2.0, False)
        yield sample(1, 1, 1, False, True, True, False, 1.0, False)
        yield sample(5, 6, 9, False, True, True, True, 1.5, True)
        yield sample(700, 600, 40, False, True, True, False, 1.0, True)
