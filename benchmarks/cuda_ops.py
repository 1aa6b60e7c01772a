"""Memory rates of the CUDA kernels between the matrix products, on the shapes of Qwen3.

    python benchmarks/cuda_ops.py [--json FILE] [--sizes 0.6B 8B] [--ops NAME ...]

Each row is the mean over the instructions of one program: as many copies of the op, on operands of their own, as make
half a gigabyte, so that none finds its operands in the cache. Times are of CUDA events with the device held up until
the launches are queued (``Engine.profile``). Bytes are the fewest that must move (``Op.cost``; for the gradient of an
embedding, those of the rows that are touched). "Share" is the rate over that of a copy of half a gigabyte, measured
first in the same way. The result is JSON on standard output or in a file, and a table beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from surogate import _native, cuda
from surogate.graph import Type
from surogate.ops import get_op

TOKENS = 4096
VOCABULARY = 151936
BYTES = 512 << 20  # of all operands of a program, at least
SIZES = {"0.6B": (1024, 3072, 16, 8, 128), "8B": (4096, 12288, 32, 8, 128)}  # hidden, inner, heads, kv heads, head_dim


@dataclass
class Case:
    """An op. ``widths``: elements from token to token of operands that are windows of something wider, by index;
    results are counted on after operands. ``reuse``: result -> operand whose storage it takes. ``nbytes``: what must
    move, where that is not ``Op.cost``'s.
    """

    op: str
    label: str
    types: list[Type | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    given: dict[int, np.ndarray] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    reuse: dict[int, int] = field(default_factory=dict)
    nbytes: int = 0


def bf16(*shape: int) -> Type:
    return Type(shape, "bf16")


def of_model(size: str) -> Iterator[Case]:
    hidden, inner, heads, kv_heads, dim = SIZES[size]
    packed = (heads + 2 * kv_heads) * dim
    x, w, row = bf16(TOKENS, hidden), bf16(hidden), Type((TOKENS,))
    rng = np.random.default_rng(0)
    text = np.minimum(rng.zipf(1.2, TOKENS) - 1, VOCABULARY - 1).astype(np.int32)
    eps, both, dx = {"eps": 1e-6}, {"need_dx": True, "need_dw": True}, {"need_dx": True, "need_dw": False}

    yield Case("embedding", "", [bf16(VOCABULARY, hidden), Type((TOKENS,), "i32")], {"dtype": "bf16"}, {1: text})
    touched = len(np.unique(text)) * hidden * 8
    dtable = Type((VOCABULARY, hidden))
    rows = {"rows": VOCABULARY}
    ids = Type((TOKENS,), "i32")
    yield Case("embedding_backward", "text", [x, ids, dtable], rows, {1: text}, nbytes=x.nbytes + touched)
    one = np.zeros(TOKENS, np.int32)
    yield Case("embedding_backward", "one id", [x, ids, dtable], rows, {1: one}, nbytes=x.nbytes + hidden * 8)

    yield Case("rmsnorm", "hidden", [x, w], eps)
    yield Case("add_rmsnorm", "hidden", [x, x, w], eps)
    yield Case("rmsnorm_backward", "hidden, dx", [x, x, w, row, None, None], dx)
    yield Case("rmsnorm_backward", "hidden, dx += ", [x, x, w, row, x, None], dx)
    yield Case("rmsnorm_backward", "hidden, dx += and dw +=", [x, x, w, row, x, Type((hidden,))], both)
    for name, count in (("q", heads), ("k", kv_heads)):
        q, norm, stats = bf16(TOKENS, count, dim), bf16(dim), Type((TOKENS, count))
        at = f"{name}, {count} heads in packed rows"
        yield Case("rmsnorm", at, [q, norm], eps, widths={0: packed})
        yield Case("rmsnorm_backward", f"{at}, dx", [q, q, norm, stats, None, None], dx, widths={1: packed, 6: packed})
        acc = Type((dim,))
        types: list[Type | None] = [q, q, norm, stats, None, acc]
        yield Case("rmsnorm_backward", f"{at}, dx and dw +=", types, both, widths={1: packed, 6: packed})
        half = Type((TOKENS, dim // 2))
        label, turn = f"{name}, {count} heads, in place", {"inverse": False}
        yield Case("rope", label, [q, half, half], turn, widths={0: packed}, reuse={0: 0})
    q, k, norm, half = bf16(TOKENS, heads, dim), bf16(TOKENS, kv_heads, dim), bf16(dim), Type((TOKENS, dim // 2))
    fused: list[Type | None] = [q, k, norm, norm, half, half]
    yield Case("qk_norm_rope", "packed rows", fused, eps, widths={0: packed, 1: packed})
    windows = {2: packed, 3: packed, 10: packed, 11: packed}
    yield Case("qk_norm_rope_backward", "packed rows, dx", [q, k, *fused, None, None], eps | dx, widths=windows)
    accs: list[Type | None] = [Type((dim,)), Type((dim,))]
    yield Case("qk_norm_rope_backward", "packed rows, dx and dw +=", [q, k, *fused, *accs], eps | both, widths=windows)
    positions = np.arange(TOKENS, dtype=np.int32)
    frequencies = (1e6 ** -(np.arange(dim // 2) / (dim // 2))).astype(np.float32)
    types = [Type((TOKENS,), "i32"), Type((dim // 2,))]
    yield Case("rope_table", "", types, {"scale": 1.0}, {0: positions, 1: frequencies})

    gate = bf16(TOKENS, inner)
    windows = {0: 2 * inner, 1: 2 * inner}
    yield Case("swiglu", "windows of one product", [gate, gate], widths=windows)
    both_windows = {1: 2 * inner, 2: 2 * inner, 3: 2 * inner, 4: 2 * inner}
    yield Case("swiglu_backward", "windows of one product", [gate] * 3, widths=both_windows)
    for name in ("silu", "gelu", "gelu_tanh", "relu", "tanh"):
        yield Case(name, "", [gate])
        yield Case(f"{name}_backward", "", [gate, gate])
    yield Case("add", "", [x, x])
    yield Case("mul", "", [x, x])
    yield Case("scale", "", [x], {"alpha": 0.5})
    yield Case("dropout", "", [x, Type((1,), "i64")], {"p": 0.1, "salt": 3}, {1: np.array([7], np.int64)})
    yield Case("sum_rows", "packed q, k, v", [bf16(TOKENS, packed), Type((packed,))])


def of_optimizer() -> Iterator[Case]:
    n = 1 << 27
    scalar, flat = Type((1,)), Type((n,))
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "salt": 1}
    scalars = {i: np.array([x], np.float32) for i, x in ((4, 1e-3), (5, 0.5), (6, 0.5), (7, 1.0))}
    common: list[Type | None] = [flat, flat, flat, scalar, scalar, scalar, scalar]
    yield Case("adamw", "f32", [flat, *common, None, None], attrs, scalars)
    yield Case("adamw", "bf16 with master", [bf16(n), *common, flat, None], attrs, scalars)
    seed = {9: np.array([7], np.int64)}
    yield Case("adamw", "bf16, stochastic", [bf16(n), *common, None, Type((1,), "i64")], attrs, {**scalars, **seed})
    yield Case("sum_squares", "", [Type((1 << 28,)), None])
    yield Case("clip_scale", "", [Type((1,), "f64")], {"max_norm": 1.0})
    yield Case("fill", "f32", [], {"value": 0.0, "shape": (1 << 28,), "dtype": "f32"})
    yield Case("copy", "f32 to bf16", [flat], {"dtype": "bf16"})
    yield Case("copy", "bf16 to f32", [bf16(n)], {"dtype": "f32"})


def measure(case: Case, arguments: dict[str, Any], sm: int, runs: int) -> tuple[float, int]:
    """Seconds of one call, and bytes that it must move."""
    op, top = get_op(case.op), 0

    def place(t: Type | None, index: int) -> tuple[Any, ...] | None:
        nonlocal top
        if t is None:
            return None
        strides = [int(np.prod(t.shape[i + 1 :])) for i in range(len(t.shape))]
        size = t.nbytes
        if index in case.widths:
            size = size // (t.shape[0] * strides[0]) * t.shape[0] * case.widths[index]
            strides[0] = case.widths[index]
        ref = ("device", top, t.dtype, t.shape, tuple(strides))
        top += -(-size // 256) * 256
        return ref

    outs = op.infer(case.types, case.attrs)
    taken = {o: i for o, i in op.inplace.items() if i < len(case.types) and case.types[i] is not None} | case.reuse
    scratch = op.workspace_cuda(case.types, outs, case.attrs, sm)
    instructions: list[tuple[Any, ...]] = []
    while top < BYTES and len(instructions) < 100:
        ins = [place(t, i) for i, t in enumerate(case.types)]
        results = [ins[taken[o]] if o in taken else place(t, len(ins) + o) for o, t in enumerate(outs)]
        work = place(Type((scratch,), "u8"), -1) if scratch else None
        instructions.append((case.op, ins, results, work, case.attrs, "compute", [], -1))
    engine = _native.Engine(**arguments)
    engine.allocate("device", top)
    noise = (np.random.default_rng(0).standard_normal(1 << 20, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for _, ins, *_ in instructions:
        for index, (ref, t) in enumerate(zip(ins, case.types, strict=True)):
            if ref is None or t is None:
                continue
            data = case.given.get(index)
            if data is None and t.dtype == "bf16" and t.nbytes < 64 << 20:
                data = np.resize(noise, t.numel)  # of a window, the first part: values do not matter, NaN would not
            if data is not None:
                engine.write("device", ref[1], data)
    engine.load("p", instructions, {}, 0)
    engine.run("p")
    engine.profile(True)
    for _ in range(runs):
        engine.run("p")
    report = engine.profile_report()
    seconds = sum(row[4] for row in report) / sum(row[3] for row in report)
    return seconds, case.nbytes or op.cost(case.types, outs, case.attrs).nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here instead of to standard output")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--ops", nargs="+", help="these alone")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    gpu, arguments = cuda.require(0), cuda.engine_arguments(0)
    seconds, nbytes = measure(Case("copy", "", [Type((BYTES // 4,))]), arguments, gpu.sm, args.runs)
    copy_rate = nbytes / seconds
    print(f"{gpu.name}: copy {copy_rate / 1e9:.0f} GB/s", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    cases = [(size, case) for size in args.sizes for case in of_model(size)] + [("", case) for case in of_optimizer()]
    for size, case in cases:
        if args.ops and case.op not in args.ops:
            continue
        seconds, nbytes = measure(case, arguments, gpu.sm, args.runs)
        rate = nbytes / seconds
        rows.append({"op": case.op, "model": size, "case": case.label, "seconds": seconds, "nbytes": nbytes})
        rows[-1] |= {"bytes_per_second": rate, "share_of_copy": rate / copy_rate}
        label = " ".join(x for x in (case.op, size, case.label) if x)
        line = f"{label:62} {seconds * 1e6:9.1f} us {rate / 1e9:7.0f} GB/s {rate / copy_rate:6.1%}"
        print(line, file=sys.stderr, flush=True)
    text = json.dumps({"gpu": gpu.name, "copy_bytes_per_second": copy_rate, "rows": rows}, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
