"""``surogate merge``: an adapter folded into its base model."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "merge",
        help="fold a LoRA adapter into its base model",
        description="Write base model + adapter as one model in Hugging Face layout.",
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter")
    parser.add_argument("output", metavar="OUTPUT", help="folder of the new model")
    parser.add_argument("--base", metavar="MODEL", help="base model; default: the one that the adapter names")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the new weights; auto (the default): the base model's",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge."""
    from surogate.export.merge import merge_adapter

    merged = merge_adapter(args.base, args.adapter, args.output, None if args.dtype == "auto" else args.dtype)
    print(f"The merged model is in {merged}")
    return 0
