"""What every format shares: the examples that rows become, and the error for a row that cannot become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, str]
"""Names of columns that the user gave: ``instruction_field`` and so on, to the column's name."""

Row = Mapping[str, Any]


class BadRow(Exception):
    """A row that cannot be trained as it is meant. Rows are counted by ``cause``; ``detail`` tells of this one.

    Args:
        cause: the same few words for every row with this fault.
        detail: what exactly was found in this row.
    """

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause, self.detail = cause, detail


@dataclass(frozen=True)
class Chat:
    """Turns that go through the chat template.

    Attributes:
        messages: turns as the template sees them (``role``, ``content``, ``tool_calls`` ...), besides ``train``: false
            for a turn that is not trained.
        tools: JSON schemas of functions, or ``None``.
        variables: more variables for the template.
        completion_from: index of the first message that is completion, where the row says so.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    completion_from: int | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation, as plain text without template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids with one truth value for each: is it a training target?"""

    ids: Sequence[int]
    targets: Sequence[bool]


Example = Chat | Completion | Text | Tokens


class Format(ABC):
    """One way to write training rows.

    Attributes:
        name: the configuration's ``type``; equal to the name of the module.
        summary: what a row looks like, in a few words, for messages.
        rank: ``auto`` asks formats in ascending order and takes the first that knows the rows.
    """

    name: str
    summary: str
    rank: int

    @abstractmethod
    def recognise(self, row: Row, fields: Fields) -> str | None:
        """Return by what the row is known to be of this format (``"fields instruction, output"``), else ``None``."""

    @abstractmethod
    def convert(self, row: Row, fields: Fields) -> Example:
        """Return the row's example.

        Raises:
            BadRow: the row lacks a field or holds something else than text where text is asked for.
        """


def find_field(row: Row, fields: Fields, key: str, usual: Sequence[str]) -> str | None:
    """Return the column to read: the one the user named under ``key``, else the first of ``usual`` that there is."""
    given = fields.get(key)
    if given is not None:
        return given if given in row else None
    return next((name for name in usual if name in row), None)


def need_field(row: Row, fields: Fields, key: str, usual: Sequence[str]) -> str:
    """Like :func:`find_field`, but raises :class:`BadRow` when the row has no such column."""
    name = find_field(row, fields, key, usual)
    if name is None:
        wanted = fields.get(key) or " or ".join(repr(n) for n in usual)
        raise BadRow(f"no field {wanted}", f"fields: {', '.join(map(str, row)) or 'none'}")
    return name


def kind(value: Any) -> str:
    """Name a value's type as JSON does."""
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def text_of(row: Row, name: str, *, empty: bool = True) -> str:
    """Return the text in a column.

    Raises:
        BadRow: there is none, it is no text, or it is empty and ``empty`` is false.
    """
    value = row.get(name)
    if not isinstance(value, str):
        raise BadRow(f"{name!r} is {kind(value)}, not text", f"{name} = {shorten(value)}" if value is not None else "")
    if not empty and not value.strip():
        raise BadRow(f"{name!r} is empty")
    return value


def shorten(value: Any, length: int = 60) -> str:
    """Return ``repr(value)``, cut to ``length`` characters."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"
