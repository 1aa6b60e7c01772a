"""Rates of the CPU kernels that do nearly all of a step's work, on the shapes of SmolLM2-135M.

    python benchmarks/cpu_kernels.py --threads 2 > benchmarks/results/cpu-gemm-tiles.md

Each row is the best of several runs. "Share" is the rate over that of one plain matrix product of the BLAS library,
2048 x 2048 x 2048, cut by rows between the threads; flops of attention are those of visible (query, key) pairs alone.
"""

from __future__ import annotations

import argparse
import platform
import time
from typing import Any

import numpy as np

from surogate import _native
from surogate.graph import Type
from surogate.ops import get_op

TOKENS, HIDDEN, INNER, QKV, VOCABULARY = 2048, 576, 1536, 960, 49152
HEADS, KV_HEADS, DIM = 9, 3, 64
RANK = 16


class Case:
    """One instruction in an engine of its own, on random operands."""

    def __init__(self, op: str, types: list[Type | None], attrs: dict[str, Any], given: dict[int, np.ndarray]) -> None:
        self.op, self.types, self.attrs, self.given = get_op(op), types, attrs, given

    def seconds(self, threads: int, limit: float) -> float:
        """Best time of a run; stops after five that no other process disturbed, or after `limit` seconds."""
        outs, top = self.op.infer(self.types, self.attrs), 0

        def place(t: Type | None) -> tuple[Any, ...] | None:
            nonlocal top
            if t is None:
                return None
            strides = [int(np.prod(t.shape[i + 1 :])) for i in range(len(t.shape))]
            ref = ("device", top, t.dtype, t.shape, tuple(strides))
            top += -(-t.nbytes // 64) * 64
            return ref

        inputs = [place(t) for t in self.types]
        taken = {o: inputs[i] for o, i in self.op.inplace.items() if i < len(inputs) and inputs[i] is not None}
        outputs = [taken.get(o) or place(t) for o, t in enumerate(outs)]
        scratch = self.op.workspace(self.types, outs, self.attrs, threads)
        workspace = place(Type((scratch,), "u8")) if scratch else None
        engine = _native.Engine("cpu", threads)
        engine.allocate("device", top)
        rng = np.random.default_rng(0)
        for index, (ref, t) in enumerate(zip(inputs, self.types, strict=True)):
            if ref is not None and t is not None:
                data = self.given.get(index)
                if data is None:
                    data = rng.standard_normal(t.numel, dtype=np.float32)
                if t.dtype == "bf16":
                    data = (data.view(np.uint32) >> 16).astype(np.uint16)
                engine.memory("device", ref[1], t.nbytes)[:] = np.ascontiguousarray(data).view(np.uint8).ravel()
        engine.load("case", [(self.op.name, inputs, outputs, workspace, self.attrs, "compute", [], -1)], {}, 0)
        engine.run("case")
        wall, undisturbed = float("inf"), 0
        stop = time.perf_counter() + limit
        while undisturbed < 5 and time.perf_counter() < stop:
            begin, busy = time.perf_counter(), time.process_time()
            engine.run("case")
            took, used = time.perf_counter() - begin, time.process_time() - busy
            wall = min(wall, took)
            if used > 0.97 * threads * took:
                undisturbed += 1
            else:
                time.sleep(0.02)
        return wall


def products() -> list[tuple[str, str, Case, float]]:
    """Label, shape, case, flops."""

    def product(label: str, m: int, n: int, k: int, *, ta: bool, tb: bool, add: bool, dtype: str = "f32") -> None:
        types = [
            Type((k, m) if ta else (m, k)),
            Type((n, k) if tb else (k, n), dtype),
            None,
            Type((m, n)) if add else None,
        ]
        case = Case("matmul", types, {"ta": ta, "tb": tb, "alpha": 1.0}, {})
        rows.append((label, f"{m} x {n} x {k}", case, 2.0 * m * n * k))

    rows: list[tuple[str, str, Case, float]] = []
    shapes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for name, (out, into) in shapes.items():
        product(f"{name}: x W^T", TOKENS, out, into, ta=False, tb=True, add=False)
        product(f"{name}: x W^T, bf16 W", TOKENS, out, into, ta=False, tb=True, add=False, dtype="bf16")
        product(f"{name}: dy W", TOKENS, into, out, ta=False, tb=False, add=False)
        product(f"{name}: dW += dy^T x", out, into, TOKENS, ta=True, tb=False, add=True)
    for name in ("qkv", "down"):
        out, into = shapes[name]
        product(f"{name}: x A^T, rank {RANK}", TOKENS, RANK, into, ta=False, tb=True, add=False)
        product(f"{name}: y += (x A^T) B^T", TOKENS, out, RANK, ta=False, tb=True, add=True)
        product(f"{name}: dB += dy^T (x A^T)", out, RANK, TOKENS, ta=True, tb=False, add=True)
        product(f"{name}: dA += (dy B)^T x", RANK, into, TOKENS, ta=True, tb=False, add=True)
    return rows


def attentions() -> list[tuple[str, str, Case, float]]:
    rows = []
    for documents, window in [([2048], 0), ([300] * 6 + [248], 0), ([100] * 20 + [48], 0), ([2048], 512)]:
        cu = np.cumsum([0, *documents]).astype(np.int32)
        q, k = Type((TOKENS, HEADS, DIM)), Type((TOKENS, KV_HEADS, DIM))
        boundaries, lse = Type(cu.shape, "i32"), Type((HEADS, TOKENS))
        attrs = {"scale": DIM**-0.5, "window": window}
        pairs = sum(min(i + 1, window or i + 1) for n in documents for i in range(n))
        shape = f"documents of {documents[0]}" + (f", window {window}" if window else "")
        each = 2.0 * pairs * HEADS * DIM
        rows.append(("attention", shape, Case("attention", [q, k, k, boundaries], attrs, {3: cu}), 2 * each))
        given = {5: np.full(lse.numel, 8, np.float32), 6: cu}
        case = Case("attention_backward", [q, q, k, k, q, lse, boundaries], attrs, given)
        rows.append(("attention_backward", shape, case, 5 * each))
    return rows


def heads() -> list[tuple[str, str, Case, float]]:
    h, targets, loss = Type((TOKENS, HIDDEN)), Type((TOKENS,), "i32"), Type((1,), "f64")
    given = {2: np.random.default_rng(0).integers(0, VOCABULARY, TOKENS).astype(np.int32), 3: np.ones(1), 4: np.ones(1)}
    shape, each = f"{TOKENS} x {VOCABULARY} x {HIDDEN}", 2.0 * TOKENS * VOCABULARY * HIDDEN
    rows = []
    for dtype in ("f32", "bf16"):
        w = Type((VOCABULARY, HIDDEN), dtype)
        rows.append((f"lm_head_loss, {dtype} W", shape, Case("lm_head_loss", [h, w, targets, loss], {}, given), each))
        given = {**given, 3: np.ones(1, np.float32)}
        types: list[Type | None] = [h, w, targets, Type((1,)), loss, Type(w.shape)]
        case = Case("lm_head_loss_grad", types, {"need_dw": True}, given)
        rows.append((f"lm_head_loss_grad, {dtype} W, dW", shape, case, 3 * each))
        case = Case("lm_head_loss_grad", [*types[:5], None], {"need_dw": False}, given)
        rows.append((f"lm_head_loss_grad, {dtype} W", shape, case, 2 * each))
        given = {**given, 3: np.ones(1)}
    return rows


def processor_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="at most, for a row (default: %(default)s)")
    args = parser.parse_args()
    plain = 0.0
    measured = []
    for label, shape, case, flops in [*products(), *attentions(), *heads()]:
        plain = max(plain, _native.sgemm_rate(args.threads, 2048, 2048, 2048))
        measured.append((label, shape, case.seconds(args.threads, args.seconds), flops))
    print(f"{processor_name()}, {args.threads} threads; {_native.blas_name()}")
    print(f"\nPlain matrix product, 2048 x 2048 x 2048: {plain / 1e9:.0f} GFLOP/s.\n")
    print("| kernel | shape | ms | GFLOP/s | share |\n|---|---|---:|---:|---:|")
    for label, shape, seconds, flops in measured:
        rate = flops / seconds
        print(f"| {label} | {shape} | {seconds * 1e3:.2f} | {rate / 1e9:.0f} | {rate / plain:.0%} |")


if __name__ == "__main__":
    main()
