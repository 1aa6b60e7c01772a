"""``surogate plan``: what a configuration will take, known before anything is loaded."""

from __future__ import annotations

from surogate.compile.compiler import Compiled
from surogate.config.schema import TrainConfig
from surogate.train.setup import choose_device, compile_config, open_model, threads_of


def plan(config: TrainConfig, dump: bool = False) -> str:
    """Compile without loading weights or data and describe the result.

    A micro-batch may hold several documents per sequence; how many is known only from the data, so the plan takes
    one for every 16 tokens, which costs 4 bytes each.

    Args:
        config: a configuration; of ``model`` only ``config.json`` is read.
        dump: append every program, instruction by instruction.
    """
    device = choose_device(config)
    files = open_model(config, with_weights=False)
    documents = config.per_device_train_batch_size * max(2, config.sequence_len // 16)
    evaluate = bool(config.validation_datasets) or config.validation_split_ratio > 0
    compiled = compile_config(
        config, files, device, max_documents=documents, eval_documents=documents if evaluate else 0
    )
    parts = [describe(compiled, config)]
    if dump:
        parts += [p.format() for p in compiled.programs.values()]
    return "\n\n".join(parts)


def describe(compiled: Compiled, config: TrainConfig) -> str:
    """Memory by purpose and the work of one optimizer step, as a table for people."""
    lines = [
        f"parameters        {compiled.parameters:,} ({compiled.trainable_parameters:,} trained)",
        f"tokens a step     {config.effective_batch_size * config.sequence_len:,}"
        f" ({config.per_device_train_batch_size} x {config.sequence_len} x {config.gradient_accumulation_steps}"
        + (f" x {config.ranks} ranks)" if config.ranks > 1 else ")"),
        f"in passes of      {compiled.batch} x {config.sequence_len}",
        f"threads           {threads_of(config)}",
        "",
        "memory",
    ]
    table = compiled.memory.table()
    lines += [f"  {purpose:<15} {human(n):>10}" for purpose, n in table.items()]
    lines.append(f"  {'total':<15} {human(sum(table.values())):>10}")
    lines += ["", f"  {'program':<15} {'instructions':>12} {'GFLOP':>10} {'GB moved':>10}"]
    for name, program in compiled.programs.items():
        work = f"{program.flops / 1e9:>10,.1f} {program.nbytes / 1e9:>10,.2f}"
        lines.append(f"  {name:<15} {len(program.instructions):>12,} {work}")
    flops, nbytes = step_work(compiled, config.effective_batch_size // config.ranks // compiled.batch)
    lines.append(f"  {'optimizer step':<15} {'':>12} {flops / 1e9:>10,.1f} {nbytes / 1e9:>10,.2f}")
    return "\n".join(lines)


def step_work(compiled: Compiled, passes: int) -> tuple[int, int]:
    """Floating-point operations, and least bytes moved, of one optimizer step with so many runs of ``micro_step``."""
    times = {"micro_step": passes, "norm_step": 1, "optimizer_step": 1}
    flops = sum(times.get(n, 0) * p.flops for n, p in compiled.programs.items())
    nbytes = sum(times.get(n, 0) * p.nbytes for n, p in compiled.programs.items())
    return flops, nbytes


def human(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"
