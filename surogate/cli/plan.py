"""``surogate plan``: what a run will take, without loading weights."""

from __future__ import annotations

import argparse

from surogate.cli import _common


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="show memory and work of a run before anything is loaded",
        description="Compile a run without loading weights; show memory by purpose, instructions, flops and bytes.",
        epilog=_common.EPILOG,
    )
    _common.add_config(parser)
    parser.add_argument("--dump", action="store_true", help="print the compiled programs too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    config = _common.load(args)
    from surogate.train.plan import plan

    print(plan(config, dump=args.dump))
    return 0
