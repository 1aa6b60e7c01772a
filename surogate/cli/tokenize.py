"""``surogate tokenize``: the data of a run, prepared and looked at, without training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from surogate.cli import _common
from surogate.errors import UserError

if TYPE_CHECKING:
    from surogate.data import Shard, Tokenizer

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "tokenize",
        help="prepare the data of a run, and show rows with what is trained in them",
        description="Read, tokenize and cache the data of a run; tell what became of the rows. A run that follows "
        "finds them in the cache.",
        epilog=_common.EPILOG,
    )
    _common.add_config(parser)
    parser.add_argument(
        "--show",
        metavar="N",
        type=int,
        default=0,
        help="print the first N rows as the model sees them: what is trained is green, or in [[ ]] without a terminal",
    )
    parser.add_argument("--pt", action="store_true", help="prepare as surogate pt does; default: as surogate sft does")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare, and show."""
    if args.show < 0:
        raise UserError(f"--show {args.show}", where="command line", expected="a number of rows")
    from surogate.config import check_mode

    config, mode = _common.load(args), "pt" if args.pt else "sft"
    check_mode(config, mode)
    from surogate.train.setup import prepare_data

    prepared, tokenizer = prepare_data(config, mode, print)
    marks = (_GREEN, _PLAIN) if sys.stdout.isatty() else ("[[", "]]")
    for number in range(min(args.show, prepared.train.rows)):
        print(f"\n--- row {number}, {prepared.train.lengths[number]} tokens")
        print("".join(_marked(prepared.train, number, tokenizer, marks)))
    return 0


def _marked(shard: Shard, number: int, tokenizer: Tokenizer, marks: tuple[str, str]) -> Iterator[str]:
    """Yield the text of a row, run by run; runs of targets between ``marks``."""
    tokens, mask = shard.row(number)
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or mask[end] != mask[start]:
            text = tokenizer.decode(tokens[start:end].tolist())
            yield marks[0] + text + marks[1] if mask[start] else text
            start = end
