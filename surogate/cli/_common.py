"""What several verbs share."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surogate.config import TrainConfig

EPILOG = "CONFIG and its keys: docs/config.md, or surogate config --schema"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG`` and ``key=value ...``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="replaces a key of the file, e.g. learning_rate=1e-4 datasets.0.path=x.jsonl",
    )


def load(args: argparse.Namespace) -> TrainConfig:
    """Read the configuration that the arguments name."""
    from surogate.config import load_config

    return load_config(args.config, args.overrides)[0]


def train(args: argparse.Namespace, mode: str) -> int:
    """Run ``surogate sft`` or ``surogate pt``."""
    from surogate.config import check_mode

    config = load(args)
    check_mode(config, mode)
    from surogate.train import run

    try:
        run(config, mode=mode, config_path=args.config)
    except KeyboardInterrupt as error:
        raise type(error)(_interrupted(args, mode, config)) from None
    return 0


def _interrupted(args: argparse.Namespace, mode: str, config: TrainConfig) -> str:
    """Say where the newest checkpoint is and how to go on from it."""
    from surogate.train.checkpoint import find_latest

    latest = find_latest(config.output_dir, lambda line: None)
    if latest is None:
        return (
            f"interrupted; there is no complete checkpoint in {config.output_dir} "
            "(one is written after a step, not before the first)"
        )
    overrides = [o for o in args.overrides if not o.startswith("resume_from_checkpoint=")]
    words = ["surogate", mode, args.config, *overrides, "resume_from_checkpoint=true"]
    return f"interrupted; the newest checkpoint is {latest}\n  to go on: {shlex.join(words)}"
