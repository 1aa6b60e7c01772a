"""``surogate tokenize``: the data of a run, prepared and looked at, without training."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from surogate.cli import _common
from surogate.errors import UserError

if TYPE_CHECKING:
    from surogate.data import Shard, Tokenizer

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# Control characters, which a terminal would obey, by their pictures; line breaks and tabs stay.
_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0x2426)


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
    from surogate.data import epoch_order
    from surogate.train.setup import prepare_data

    with _bar() as progress:
        prepared, tokenizer = prepare_data(config, mode, print, progress=progress)
    batch = config.effective_batch_size
    order = epoch_order(
        prepared.train,
        sequence_len=config.sequence_len,
        packing=config.sample_packing,
        seed=config.seed,
        epoch=0,
        global_batch=batch,
    )
    print(f"first epoch: {order}; {len(order) // batch:,} steps")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for number in range(min(args.show, prepared.train.rows)):
        print("\n" + "".join(shown(prepared.train, number, tokenizer, config.sequence_len, colour)))
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None] | None]:
    """Give what shows progress: a bar on a terminal, else nothing, and then the report has lines instead."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, int] = {}

        def progress(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = int(bar.add_task(name, total=1.0))
            bar.update(tasks[name], completed=share)  # type: ignore[arg-type]

        yield progress


def shown(shard: Shard, number: int, tokenizer: Tokenizer, sequence_len: int, colour: bool) -> Iterator[str]:
    """Yield the text of a row of a shard, with marks around what is trained.

    Args:
        shard: where the row is.
        number: of the row.
        tokenizer: of the model.
        sequence_len: a longer row is trained in pieces, whose edges are shown.
        colour: mark with colours, else with ``[[`` and ``]]``.
    """
    tokens, mask = shard.row(number)
    ids = tokens.tolist()
    head = f"--- {shard.origin(int(shard.index[number]))}: {len(ids)} tokens, {int(mask.sum())} trained\n"
    yield _DIM + head + _PLAIN if colour else head
    on, off = (_GREEN, _PLAIN) if colour else ("[[", "]]")
    whole = tokenizer.decode(ids)
    start, at = 0, 0
    for end in range(1, len(ids) + 1):
        edge = end < len(ids) and end % sequence_len == 0
        if end < len(ids) and mask[end] == mask[start] and not edge:
            continue
        # Decoding a part alone may lose a space at its beginning, so the text is cut out of the whole.
        upto = len(whole) if end == len(ids) else len(os.path.commonprefix([whole, tokenizer.decode(ids[:end])]))
        text = whole[at:upto].translate(_PICTURES)
        yield on + text + off if mask[start] and text else text
        if edge:
            line = "\n--- the next sequence goes on\n"
            yield _DIM + line + _PLAIN if colour else line
        start, at = end, upto
