"""``surogate init``: a configuration for a model and a data set, written after a look at both."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "init",
        help="write a configuration for a model and your data",
        description="Look at a model and at rows of a data set, and write a commented configuration that runs as it "
        "is. Asks nothing, trains nothing, overwrites nothing.",
        epilog="All keys: docs/config.md, or surogate config --schema",
    )
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, or id on the Hugging Face hub")
    parser.add_argument("data", metavar="DATA", help="file, folder, or id of a data set on the Hugging Face hub")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="config.yaml", help="file to write; default: config.yaml"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, write, and say what to type next."""
    from surogate.config import load_config
    from surogate.errors import UserError
    from surogate.io.files import atomic_file
    from surogate.train.suggest import suggest

    path = Path(args.output)
    if path.exists():
        raise UserError("there is such a file already", where=str(path), fix="name another one: -o FILE")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", where=str(path), fix="create it, or name another: -o FILE")
    found = suggest(args.model, args.data)
    with atomic_file(path) as file:
        file.write(found.text.encode())
    load_config(str(path))
    name = shlex.quote(str(path))
    print(f"{path}: {found.summary}")
    print(f"  to see what is trained:   surogate tokenize {name} --show 3{' --pt' if found.mode == 'pt' else ''}")
    print(f"  to see what memory it takes:   surogate plan {name}")
    print(f"  to train:   surogate {found.mode} {name}")
    return 0
