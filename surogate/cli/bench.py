"""``surogate bench``: the speed of the real training step for a model's shape, without data or download."""

from __future__ import annotations

import argparse
import json
from typing import Any


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "bench",
        help="time the real training step of a model's shape, with random weights",
        description="Time the real training step of a model's shape with random weights and tokens, and set it against "
        "the floor: every product and attention at the rate that this device reaches for exactly these shapes alone, "
        "everything else at its copy rate.",
    )
    parser.add_argument("size", metavar="MODEL", help="a shape such as smollm2-135m, qwen3-0.6b, qwen2.5-7b")
    parser.add_argument("--mode", choices=["lora", "full"], default="lora", help="default: lora, rank 16, all layers")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="sequences a micro-batch (default 2)")
    parser.add_argument("--sequence-len", type=int, default=2048, metavar="N", help="default 2048")
    parser.add_argument("--accumulation", type=int, default=4, metavar="N", help="micro-batches a step (default 4)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps that are timed (default 6)")
    parser.add_argument("--recompute", choices=["off", "selective", "block"], default="off")
    parser.add_argument("--recipe", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--optim", choices=["adamw", "adamw_8bit"], default="adamw", help="default: adamw")
    parser.add_argument("--moments-dtype", choices=["float32", "bfloat16"], default="float32", help="of AdamW")
    parser.add_argument(
        "--no-master", action="store_true", help="no float32 copies of bf16 weights: updates are rounded stochastically"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: one a physical core")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the whole record there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from surogate.errors import UserError
    from surogate.track.machine import Machine
    from surogate.train.bench import BenchOptions, bench
    from surogate.train.setup import default_cache

    for name in ("batch", "sequence_len", "accumulation", "steps"):
        if getattr(args, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(args, name)}", where="command line", expected="1 or more"
            )
    record = bench(
        BenchOptions(
            size=args.size,
            mode=args.mode,
            batch=args.batch,
            sequence_len=args.sequence_len,
            accumulation=args.accumulation,
            steps=args.steps,
            recompute=args.recompute,
            recipe=args.recipe,
            optimizer=args.optim,
            moments={"float32": "f32", "bfloat16": "bf16"}[args.moments_dtype],
            master=not args.no_master,
            threads=args.threads,
            device=args.device,
            cache_dir=default_cache() if args.device == "cuda" else None,
        )
    )
    record["machine"] = str(Machine.here())
    print(_table(record))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    return 0


def _table(r: dict[str, Any]) -> str:
    gib = 1 << 30
    lines = [
        f"{r['options']['size']} {r['options']['mode']}: {r['tokens_per_second']:,.0f} tokens/s, "
        f"{r['step_seconds']:.3f} s a step of {r['tokens_per_step']:,} tokens",
        f"  {r['flops_per_second'] / 1e12:,.3f} TFLOP/s; floor {r['floor_seconds']:.3f} s, "
        f"{r['share_of_floor']:.1%} of it reached",
        f"  memory planned and allocated {r['memory_plan']['total'] / gib:,.2f} GiB",
        f"  first step {r['first_step_after']:.1f} s after the start",
        "",
        f"  {'op':<22} {'ms a step':>10} {'share':>7} {'GFLOP/s':>10} {'GB/s':>8}",
    ]
    whole = sum(row["seconds"] for row in r["profile"]) or 1.0
    for row in r["profile"][:12]:
        seconds = row["seconds"] or 1e-12
        lines.append(
            f"  {row['op']:<22} {1e3 * seconds:>10,.1f} {seconds / whole:>7.1%} "
            f"{row['flops'] / seconds / 1e9:>10,.0f} {row['nbytes'] / seconds / 1e9:>8,.1f}"
        )
    return "\n".join(lines)
