"""``surogate bench``: the real training step of a model's shape, timed, and set against the floor of the machine.

Weights and tokens are random; everything else is what ``surogate sft`` runs. The *floor* is the time that the step
would take if every matrix product and attention ran as fast as this device runs it alone, over and over, and every
other instruction moved its bytes at the device's copy rate.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import Compiled, CompileOptions, compile_model
from surogate.compile.program import Instruction, TensorRef
from surogate.compile.recompute import Mode
from surogate.models import build
from surogate.optim import make_optimizer
from surogate.recipes import get_recipe
from surogate.train.plan import step_work
from surogate.train.runtime import Runtime, physical_cores
from surogate.train.shapes import config_of

_ATTENTION = ("attention", "attention_backward")  # their flops are an upper bound, so only their time counts
_HEAD = ("lm_head_loss", "lm_head_loss_grad")  # products inside one op: the best rate of a large product
_SECONDS = 0.02  # how long a measurement of one instruction lasts at least


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. ``mode``: ``lora`` (rank 16 on every linear layer) or ``full``."""

    size: str
    mode: str = "lora"
    batch: int = 2
    sequence_len: int = 2048
    accumulation: int = 4
    steps: int = 6
    warmup: int = 2
    recompute: Mode = "off"
    recipe: str = "auto"
    threads: int = 0
    rank: int = 16
    optimizer: str = "adamw"
    moments: str = "f32"  # or bf16
    master: bool = True  # f32 copies of bf16 weights
    device: str = "cpu"
    cache_dir: Path | None = None  # a GPU's chosen algorithms


def bench(options: BenchOptions) -> dict[str, Any]:
    """Measure; returns a record for JSON. Seconds, bytes, flop/s; ``share_of_floor`` is floor / measured time."""
    started = time.perf_counter()
    threads = options.threads or physical_cores()
    sm, gpu = 0, None
    if options.device == "cuda":
        from surogate import cuda

        sm = cuda.require(0).sm
        gpu = cuda.engine_arguments(0, cache_dir=options.cache_dir)
    compiled = _compile(options, threads, sm)
    runtime = Runtime(compiled, threads, gpu)
    _fill(runtime)
    with tempfile.TemporaryDirectory(prefix="surogate-bench-") as folder:
        seconds, ready = _steps(runtime, options, Path(folder), started)
        profile = _profile(runtime, options, Path(folder))
    floor, rates = _floor(runtime, compiled, options.accumulation)
    tokens = options.batch * options.sequence_len * options.accumulation
    flops, _ = step_work(compiled, options.accumulation)
    step = statistics.median(seconds)
    table = compiled.memory.table()
    return {
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()},
        "threads": threads,
        "parameters": compiled.parameters,
        "trainable": compiled.trainable_parameters,
        "tokens_per_step": tokens,
        "step_seconds": step,
        "all_steps": seconds,
        "tokens_per_second": tokens / step,
        "flops_per_step": flops,
        "flops_per_second": flops / step,
        "first_step_after": ready,
        "floor_seconds": floor,
        "share_of_floor": floor / step,
        "rates": rates,
        "profile": profile,
        "memory_plan": table | {"total": sum(table.values())},
        "memory_allocated": runtime.engine.allocated(),
    }


def _compile(o: BenchOptions, threads: int, sm: int) -> Compiled:
    options = CompileOptions(
        batch=o.batch,
        sequence_len=o.sequence_len,
        max_documents=o.batch,
        recipe=get_recipe(o.recipe, master=o.master, device=o.device),
        lora=LoraOptions(rank=o.rank, alpha=2.0 * o.rank) if o.mode == "lora" else None,
        optimizer=make_optimizer(o.optimizer, moments=o.moments, weight_decay=0.01),
        recompute=o.recompute,
        threads=threads,
        device=o.device,
        sm=sm,
    )
    return compile_model(build(config_of(o.size)), options, lambda name: "bf16")


def _fill(runtime: Runtime) -> None:
    """Random weights: one tile of noise, repeated, since drawing billions of numbers would take minutes."""
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 20, np.float32) * 0.02).astype(np.float32)
    bits = (noise.view(np.uint32) >> 16).astype(np.uint16)

    def put(target: np.ndarray) -> None:
        flat, tile = target.reshape(-1), bits if target.dtype == np.uint16 else noise
        for start in range(0, flat.size, tile.size):
            part = flat[start : start + tile.size]
            part[:] = tile[: part.size]

    for weight in runtime.compiled.weights.values():
        if len(weight.ref.shape) > 1:
            runtime.fill(weight.ref, put)
        else:
            one = 0x3F80 if weight.ref.dtype == "bf16" else 1
            runtime.fill(weight.ref, lambda target, one=one: target.fill(one))  # type: ignore[misc]
    for group in runtime.compiled.groups:
        for slot in group.slots:
            if f"master.{slot}" in runtime.compiled.memory.slots:
                runtime.write(runtime.compiled.memory.ref(f"master.{slot}"), runtime.values(slot))


def _feeder(o: BenchOptions, folder: Path, steps: int) -> Any:
    """Random documents, one a sequence."""
    from surogate import _native

    count = o.batch * o.accumulation * steps
    vocabulary = config_of(o.size)["vocab_size"]
    rng = np.random.default_rng(1)
    rng.integers(0, vocabulary, count * o.sequence_len, np.int32).tofile(folder / "tokens.bin")
    np.ones(count * o.sequence_len, np.uint8).tofile(folder / "mask.bin")
    starts = np.arange(count, dtype=np.int64) * o.sequence_len
    pieces = np.stack([starts, np.full(count, o.sequence_len), np.zeros(count, np.int64)], axis=1).astype(np.int64)
    sequences = np.arange(count + 1, dtype=np.int64)
    files = str(folder / "tokens.bin"), str(folder / "mask.bin")
    return _native.Feeder(*files, np.ascontiguousarray(pieces), sequences, o.batch, o.sequence_len, o.batch, 0)


def _scalars(step: int) -> dict[str, float]:
    return {"lr": 1e-5, "bias_correction1": 1 - 0.9**step, "bias_correction2": 1 - 0.999**step}


def _steps(runtime: Runtime, o: BenchOptions, folder: Path, started: float) -> tuple[list[float], float]:
    """Seconds of every step after warm-up, and from the start to the end of the first step."""
    feed = _feeder(o, folder, o.warmup + o.steps)
    seconds, first = [], 0.0
    for step in range(1, o.warmup + o.steps + 1):
        begin = time.perf_counter()
        runtime.train_step(feed, o.accumulation, _scalars(step), 0, step)
        _wait(runtime)
        end = time.perf_counter()
        if step == 1:
            first = end - started
        if step > o.warmup:
            seconds.append(end - begin)
    return seconds, first


def _wait(runtime: Runtime) -> None:
    """Until the device has done all that it was given."""
    runtime.read(runtime.compiled.memory.ref("grad_norm"))


def _profile(runtime: Runtime, o: BenchOptions, folder: Path) -> list[dict[str, Any]]:
    """Seconds of one step by op, the largest first, with the work that the compiler counted."""
    runtime.engine.profile(True)
    before = {(p, i): s for p, i, _, _, s in runtime.engine.profile_report()}
    runtime.train_step(_feeder(o, folder, 1), o.accumulation, _scalars(1), 0, 1)
    runtime.engine.profile(False)
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"seconds": 0.0, "flops": 0, "nbytes": 0, "calls": 0})
    for program, index, op, calls, seconds in runtime.engine.profile_report():
        instruction = runtime.compiled.programs[program].instructions[index]
        times = o.accumulation if program == "micro_step" else 1
        row = rows[op]
        row["seconds"] += seconds - before.get((program, index), 0.0)
        row["flops"] += instruction.flops * times
        row["nbytes"] += instruction.nbytes * times
        row["calls"] += min(calls, times)
    return sorted(({"op": op, **row} for op, row in rows.items()), key=lambda row: -row["seconds"])


def _floor(runtime: Runtime, compiled: Compiled, accumulation: int) -> tuple[float, dict[str, Any]]:
    """Seconds of the step at the rates of this device, and those rates."""
    copy_rate = _copy_rate(runtime)
    counts = {"micro_step": accumulation, "norm_step": 1, "optimizer_step": 1}
    steps = [(n, i) for name, n in counts.items() for i in compiled.programs[name].instructions]
    alone: dict[str, float] = {}
    best = 0.0
    for _, instruction in steps:
        key = _signature(instruction)
        if instruction.op in ("matmul", *_ATTENTION) and key not in alone:
            alone[key] = _seconds(runtime, instruction)
            if instruction.op == "matmul":
                best = max(best, instruction.flops / alone[key])
    total = 0.0
    for n, instruction in steps:
        bound = instruction.nbytes / copy_rate
        if instruction.op in _HEAD:
            total += n * instruction.flops / best
        elif instruction.op in _ATTENTION:
            total += n * alone[_signature(instruction)]
        elif instruction.op == "matmul":
            # A product with a small dimension is bound by memory and could ride on a neighbour.
            total += n * min(alone[_signature(instruction)], max(instruction.flops / best, bound))
        else:
            total += n * bound
    return total, {"copy_bytes_per_second": copy_rate, "best_product_flops_per_second": best, "alone_seconds": alone}


def product_rate(runtime: Runtime) -> float:
    """Rate of the largest product of the forward pass, run by itself, flop/s. Overwrites activations only."""
    products = [
        i
        for i in runtime.compiled.programs["micro_step"].instructions
        if i.op == "matmul" and i.phase == "forward" and i.inputs[3] is None
    ]
    largest = max(products, key=lambda i: i.flops)
    return largest.flops / _seconds(runtime, largest)


def _signature(i: Instruction) -> str:
    def form(refs: Iterable[TensorRef | None]) -> str:
        return ";".join(
            "_" if r is None else f"{r.dtype}{list(r.shape)}/{r.strides[0] if r.strides else 0}" for r in refs
        )

    return f"{i.op} {form(i.inputs)} -> {form(i.outputs)} {sorted(i.attrs.items())}"


def _seconds(runtime: Runtime, instruction: Instruction) -> float:
    """Best seconds of one instruction, repeated by itself."""
    repeat = 1
    while True:
        runtime.engine.load("alone", [instruction.tuple()] * repeat, {}, 0)
        found = []
        for _ in range(4):
            begin = time.perf_counter()
            runtime.engine.run("alone")
            _wait(runtime)
            found.append(time.perf_counter() - begin)
        best = min(found[1:])
        if best >= _SECONDS or repeat >= 4096:
            return best / repeat
        repeat = min(4096, max(2 * repeat, int(repeat * 1.2 * _SECONDS / max(best, 1e-6))))


def _copy_rate(runtime: Runtime) -> float:
    """Bytes read and written per second by a large copy inside the device's arena."""
    half = min(runtime.compiled.memory.size("device") // 2, 1 << 30) // 512 * 256
    base = runtime.compiled.memory.size("device") - 2 * half
    base -= base % 256
    source = TensorRef("device", base, "u8", (half,), (1,))
    target = TensorRef("device", base + half, "u8", (half,), (1,))
    copy = Instruction("copy", [source], [target], None, {})
    return 2 * half / _seconds(runtime, copy)
