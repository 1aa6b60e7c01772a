"""Rates of the products, of attention and of the LM head on a GPU, on the shapes of Qwen3.

    python benchmarks/gpu_kernels.py [--json FILE] [--quick]

Each row is the mean over several runs of one instruction, by CUDA events with the device held up until the launch is
queued (``Engine.profile``). "Share" is the rate over that of one large bf16 product, measured first on the same device;
flops of attention are those of visible (query, key) pairs alone, and its backward pass counts five products a pair.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from surogate import _native, cuda
from surogate.graph import Type
from surogate.ops import get_op


@dataclass
class Case:
    """An instruction on random operands. ``flops`` of one run; ``given``: operands by index."""

    name: str
    op: str
    types: list[Type | None]
    attrs: dict[str, Any]
    flops: float
    given: dict[int, np.ndarray] = field(default_factory=dict)


def product(name: str, m: int, n: int, k: int, kind: str) -> Case:
    """``fwd``: y = x w^T. ``dx``: dy w. ``dw``: += dy^T x in f32. m tokens, w is [n,k]."""
    bf16 = lambda *shape: Type(shape, "bf16")  # noqa: E731
    attrs: dict[str, Any] = {"ta": False, "tb": False, "alpha": 1.0}
    if kind == "fwd":
        types: list[Type | None] = [bf16(m, k), bf16(n, k), None, None]
        attrs["tb"] = True
    elif kind == "dx":
        types = [bf16(m, n), bf16(n, k), None, None]
    else:
        types = [bf16(m, n), bf16(m, k), None, Type((n, k))]
        attrs |= {"ta": True, "dtype": "f32"}
    return Case(f"{name} {kind} {m}x{n}x{k}", "matmul", types, attrs, 2.0 * m * n * k)


def attention(name: str, lengths: list[int], slots: int, longest: int, heads: int, kv: int, dim: int) -> Iterator[Case]:
    tokens = sum(lengths)
    cu = np.full(slots + 1, tokens, np.int32)
    cu[: len(lengths) + 1] = np.cumsum([0, *lengths])
    q, k, boundaries = Type((tokens, heads, dim), "bf16"), Type((tokens, kv, dim), "bf16"), Type((slots + 1,), "i32")
    attrs = {"scale": dim**-0.5, "window": 0, "max_length": longest}
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    yield Case(f"{name} fwd", "attention", [q, k, k, boundaries], attrs, 4 * pairs * heads * dim, {3: cu})
    # Any lse will do for the time; a large one keeps the probabilities small.
    lse = np.full((heads, tokens), 10.0, np.float32)
    types: list[Type | None] = [q, q, k, k, q, Type((heads, tokens)), boundaries]
    yield Case(f"{name} bwd", "attention_backward", types, attrs, 10 * pairs * heads * dim, {5: lse, 6: cu})


def head(name: str, tokens: int, dim: int, vocabulary: int, need_dw: bool) -> Case:
    targets = np.random.default_rng(0).integers(0, vocabulary, tokens).astype(np.int32)
    types = [Type((tokens, dim), "bf16"), Type((vocabulary, dim), "bf16"), Type((tokens,), "i32"), Type((1,))]
    acc = [Type((1,), "f64"), Type((vocabulary, dim)) if need_dw else None]
    flops = (6.0 if need_dw else 4.0) * tokens * dim * vocabulary
    given = {2: targets, 3: np.array([1e-4], np.float32)}
    return Case(name, "lm_head_loss_grad", [*types, *acc], {"need_dw": need_dw}, flops, given)


def cases(quick: bool) -> Iterator[Case]:
    yield product("ceiling", 8192, 8192, 8192, "fwd")
    sizes = {"0.6B": (4096, 1024, 4096, 2048, 3072)}
    if not quick:
        sizes["8B"] = (4096, 4096, 6144, 4096, 12288)
    for size, (tokens, hidden, qkv, out, inner) in sizes.items():
        for kind in ("fwd", "dx", "dw"):
            yield product(f"{size} qkv", tokens, qkv, hidden, kind)
            yield product(f"{size} out", tokens, hidden, out, kind)
            yield product(f"{size} gate+up", tokens, 2 * inner, hidden, kind)
            yield product(f"{size} down", tokens, hidden, inner, kind)
    yield product("0.6B LoRA down", 4096, 16, 1024, "fwd")
    yield product("0.6B LoRA up", 4096, 1024, 16, "fwd")
    yield from attention("attention 2x2048 16/8", [2048] * 2, 2, 2048, 16, 8, 128)
    yield from attention("attention 2x2048 32/8 of 64", [2048] * 2, 64, 2048, 32, 8, 128)
    yield from attention("attention 10x400 32/8 of 64", [400] * 10 + [96], 64, 2048, 32, 8, 128)
    # The parts of the LM head, by tokens of a chunk.
    for rows in (1024, 2048, 4096):
        yield product(f"0.6B head, {rows} tokens", rows, 151936, 1024, "fwd")
        yield product(f"0.6B head, {rows} tokens", rows, 151936, 1024, "dx")
    yield head("0.6B head", 4096, 1024, 151936, False)
    yield head("0.6B head, dw", 4096, 1024, 151936, True)


def measure(case: Case, arguments: dict[str, Any], sm: int, runs: int) -> float:
    """Seconds of one run."""
    op, top = get_op(case.op), 0

    def place(t: Type | None) -> tuple[Any, ...] | None:
        nonlocal top
        if t is None:
            return None
        ref = ("device", top, t.dtype, t.shape, tuple(int(np.prod(t.shape[i + 1 :])) for i in range(len(t.shape))))
        top += -(-t.nbytes // 256) * 256
        return ref

    outs = op.infer(case.types, case.attrs)
    inputs = [place(t) for t in case.types]
    taken = {o: inputs[i] for o, i in op.inplace.items() if i < len(inputs) and inputs[i] is not None}
    outputs = [taken.get(o) or place(t) for o, t in enumerate(outs)]
    scratch = op.workspace_cuda(case.types, outs, case.attrs, sm)
    work = place(Type((scratch,), "u8")) if scratch else None
    engine = _native.Engine(**arguments)
    engine.allocate("device", top)
    noise = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    bits = (noise.view(np.uint32) >> 16).astype(np.uint16)
    for index, (ref, t) in enumerate(zip(inputs, case.types, strict=True)):
        if ref is None or t is None:
            continue
        data = case.given.get(index)
        if data is None and t.dtype == "bf16":
            data = np.resize(bits, t.numel)
        if data is not None:
            engine.write("device", ref[1], data)
    engine.load("p", [(case.op, inputs, outputs, work, case.attrs, "compute", [], -1)], {}, 0)
    engine.run("p")
    engine.run("p")
    engine.profile(True)
    for _ in range(runs):
        engine.run("p")
    ((_, _, _, calls, seconds),) = engine.profile_report()
    return seconds / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the small model alone")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--cache", type=Path, help="folder for chosen algorithms")
    args = parser.parse_args()
    gpu, arguments = cuda.require(0), cuda.engine_arguments(0, cache_dir=args.cache)
    rows: list[dict[str, Any]] = []
    ceiling = 0.0
    for case in cases(args.quick):
        try:
            seconds = measure(case, arguments, gpu.sm, args.runs)
        except RuntimeError as error:
            rows.append({"case": case.name, "error": str(error)})
            print(f"{case.name:42} {error}", flush=True)
            continue
        rate = case.flops / seconds
        ceiling = ceiling or rate
        rows.append({"case": case.name, "seconds": seconds, "flops_per_second": rate, "share": rate / ceiling})
        print(f"{case.name:42} {seconds * 1e6:9.1f} us {rate / 1e12:7.1f} TFLOP/s {rate / ceiling:6.1%}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"gpu": gpu.name, **cuda.versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
