"""The command line: one file a verb.

A verb is a module of this folder (its name is the verb's) with ``register(subparsers)``, which adds its parser, and
``run(args) -> int``, which does the work and returns the exit code. Modules are found by listing the folder, so they
import what is heavy inside ``run``.

Exit codes: 0 done; 1 failed; 2 a mistake that the user can mend, told in one message; 130 interrupted; 143 terminated;
141 nobody reads the output any more (as other Unix tools have it).
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from surogate.errors import Terminated, TrainingFailed, UserError

DONE, FAILED, MISTAKE, INTERRUPTED, CLOSED_PIPE, TERMINATED = 0, 1, 2, 130, 141, 143


class _Parser(argparse.ArgumentParser):
    """Answers ``--learning_rate 1e-4`` by the way that it is written here."""

    def error(self, message: str) -> None:  # type: ignore[override]
        words = message.removeprefix("unrecognized arguments: ").split()
        if words != message.split() and words[0].startswith("--"):
            key, _, value = words[0][2:].partition("=")
            value = value or (words[1] if len(words) > 1 else "VALUE")
            message += f"\n  fix: keys of the configuration are written {key.replace('-', '_')}={value}"
        super().error(message)


def verbs() -> dict[str, ModuleType]:
    """Import every verb of this folder, by name."""
    found = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in found}


def parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs."""
    top = _Parser(prog="surogate", description="Train language models: pre-training, fine-tuning, LoRA.")
    top.add_argument("--version", action="store_true", help="print the version and stop")
    subparsers = top.add_subparsers(dest="verb", metavar="COMMAND", parser_class=_Parser)
    for module in verbs().values():
        module.register(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments without the program's name; None: the process's.
    """
    top = parser()
    try:
        args, rest = top.parse_known_args(argv)
        # argparse takes no key=value after an option (plan c.yaml --dump seed=1), so they come here.
        if hasattr(args, "overrides"):
            args.overrides += [word for word in rest if "=" in word and not word.startswith("-")]
            rest = [word for word in rest if word not in args.overrides]
        if rest:
            top.error(f"unrecognized arguments: {' '.join(rest)}")
        if args.version:
            from surogate import __version__

            print(f"surogate {__version__}")
            return DONE
        if args.verb is None:
            top.print_help()
            return MISTAKE
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
        return code
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return MISTAKE
    except TrainingFailed as error:
        print(f"surogate: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as error:
        print(f"\nsurogate: {error}" if str(error) else "\nsurogate: interrupted", file=sys.stderr)
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
