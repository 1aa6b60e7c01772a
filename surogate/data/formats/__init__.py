"""What a row of a data set may be: one file a format.

A module here whose name has no leading underscore is a format, and its name is the ``type`` that the configuration
gives. It defines ``FORMAT``, a :class:`surogate.data.formats._base.Format`. ``auto`` is the one module that is none:
it chooses among the others.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from surogate.data.formats._base import BadRow, Chat, Completion, Example, Fields, Format, Text, Tokens

__all__ = [
    "BadRow", "Chat", "Completion", "Example", "Fields", "Format", "Text", "Tokens", "format_names", "get_format",
    "formats",
]  # fmt: skip


def format_names() -> list[str]:
    """Return the names of all formats, sorted; ``auto`` is not among them."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if path.stem != "auto")


@cache
def formats() -> tuple[Format, ...]:
    """Return every format, in the order in which ``auto`` asks them."""
    found = [import_module(f"{__name__}.{name}").FORMAT for name in format_names()]
    return tuple(sorted(found, key=lambda entry: entry.rank))


def get_format(name: str) -> Format:
    """Return the format of that name.

    Raises:
        KeyError: there is none.
    """
    return {entry.name: entry for entry in formats()}[name]
