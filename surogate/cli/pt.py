"""``surogate pt``: pre-training, continued or from scratch."""

from __future__ import annotations

import argparse

from surogate.cli import _common


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "pt",
        help="pre-train a model on text, from scratch (from_scratch: true) or continued",
        description="Pre-train a model on text: every token is a target. from_scratch: true starts anew.",
        epilog=_common.EPILOG,
    )
    _common.add_config(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train."""
    return _common.train(args, "pt")
