"""``surogate sft``: supervised fine-tuning, of all weights or with LoRA."""

from __future__ import annotations

import argparse

from surogate.cli import _common


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "sft",
        help="fine-tune a model on instructions or conversations",
        description="Fine-tune a model on instructions or conversations: all of its weights, or LoRA adapters.",
        epilog=_common.EPILOG,
    )
    _common.add_config(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train."""
    return _common.train(args, "sft")
