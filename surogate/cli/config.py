"""``surogate config``: check a configuration, or print its schema."""

from __future__ import annotations

import argparse

from surogate.cli import _common
from surogate.errors import UserError


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "config",
        help="check a configuration and print it with every default; or print the JSON Schema",
        description="Check a configuration and print it with every default, or print the JSON Schema for editors.",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="replaces a key of the file")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a configuration")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print."""
    if args.schema:
        import json

        from surogate.config import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    if args.config is None:
        raise UserError("no file is named", expected="surogate config CONFIG, or surogate config --schema")
    from surogate.config import resolved_yaml

    print(resolved_yaml(_common.load(args)), end="")
    return 0
