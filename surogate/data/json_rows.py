"""JSON Lines, and JSON documents of any size that hold a list of rows: read as a stream, row by row."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from surogate.data.chunks import CHUNK_BYTES, CHUNK_ROWS, Chunk, Lines, Rows, json_remedy, not_utf8
from surogate.data.readers import kind_of
from surogate.errors import UserError

HOLDERS = ("data", "rows", "examples", "train")
"""Keys of a document under which the list of rows may be."""

_SPACE = re.compile(r"[ \t\n\r]*")
_EDGE = 16  # characters at the end of what was read within which an error may be the end's fault alone


def read_json(index: int, path: Path, blocks: Iterator[bytes]) -> Iterator[Chunk]:
    """Yield the chunks of a file: what is in it decides, not its ending alone.

    Args:
        index: of the file in its data set.
        path: of the file, for messages.
        blocks: its contents.

    Raises:
        UserError: it is no JSON, or holds no rows.
    """
    head = next(blocks, b"")
    line = next((part for part in head.split(b"\n") if part.strip()), b"")
    whole = line.lstrip().startswith(b"[")
    if not whole and kind_of(path) and ".json" in path.suffixes:
        try:
            json.loads(line)
            whole = line.strip() == head.strip()  # one line: an object that holds the rows, or the only row
        except ValueError:
            whole = not line.rstrip().endswith(b"}")
    if whole:
        yield from _document(index, path, chain([head], blocks))
    else:
        yield from _lines(index, path, chain([head], blocks))


def _lines(index: int, path: Path, blocks: Iterator[bytes]) -> Iterator[Chunk]:
    first = 1
    begun: list[bytes] = []  # blocks of a line whose end has not been read
    for block in chain(blocks, [b""]):
        end = block.rfind(b"\n") + 1
        if block and not end:
            begun.append(block)
            continue
        data = b"".join([*begun, block[:end]])
        begun = [block[end:]]
        position = 0
        while position < len(data):
            stop = data.find(b"\n", position + CHUNK_BYTES) + 1 or len(data)
            part = data[position:stop]
            yield Lines(index, str(path), first, len(part), part)
            first += part.count(b"\n")
            position = stop


class _Window:
    """The part of a document that is being parsed. What lies behind is let go; more is read where it ends too early."""

    def __init__(self, path: Path, blocks: Iterator[bytes]) -> None:
        self.path, self._blocks = path, blocks
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self.text, self.at = "", 0
        self._dropped = 0
        self._line = self._column = 1  # of text[0]

    @property
    def position(self) -> int:
        """Characters parsed."""
        return self._dropped + self.at

    def _place(self, at: int) -> str:
        before = self.text[:at]
        breaks = before.count("\n")
        column = at - before.rfind("\n") if breaks else self._column + at
        return f"{self.path}:{self._line + breaks}:{column}"

    def more(self) -> bool:
        """Read on, so that at least twice as much is there to be parsed; return false at the end of the file."""
        gone = self.text[: self.at]
        if gone:
            breaks = gone.count("\n")
            self._column = len(gone) - gone.rfind("\n") if breaks else self._column + len(gone)
            self._line += breaks
            self._dropped += len(gone)
        parts = [self.text[self.at :]]
        self.text, self.at = parts[0], 0
        wanted = len(parts[0])
        read = 0
        for block in chain(self._blocks, [b""]):
            try:
                parts.append(self._utf8.decode(block, final=not block))
            except UnicodeDecodeError as error:
                self.text = "".join([*parts, error.object[: error.start].decode("utf-8", "replace")])
                raise not_utf8(error.object[error.start], self._place(len(self.text))) from None
            read += len(parts[-1])
            if read > wanted:
                break
        self.text = "".join(parts)
        return read > 0

    def peek(self) -> str:
        """Skip white space and return the next character; empty at the end of the file."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def take(self, characters: str, message: str) -> str:
        """Take the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in characters:
            raise self.error(message, self.at)
        self.at += 1
        return found

    def value(self) -> Any:
        """Parse the value that begins here."""
        self.peek()
        while True:
            try:
                value, end = self._json.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _EDGE
                behind = error.pos - self.at
                if cut and self.more():
                    continue
                raise self.error(error.msg, self.at + behind if cut else error.pos) from None
            except RecursionError:
                raise UserError("JSON that is nested too deeply", where=self._place(self.at)) from None
            length = end - self.at
            if end > len(self.text) - _EDGE and self.more():
                continue  # a number may go on ("1" of "1.5")
            self.at += length
            return value

    def error(self, message: str, at: int) -> UserError:
        """Return the error about JSON that is wrong at this character of ``text``."""
        around = self.text[max(0, at - 99) : at + 99].encode("utf-8", "replace")
        return UserError(f"not valid JSON: {message}", where=self._place(at), fix=json_remedy(around))


def _document(index: int, path: Path, blocks: Iterator[bytes]) -> Iterator[Chunk]:
    window = _Window(path, blocks)
    opening = window.peek()
    if opening == "[":
        yield from _list(index, window)
    elif opening == "{":
        yield from _object(index, window)
    else:
        window.value()
        raise UserError("the file holds no rows", where=str(path), expected="a list of objects, or one object a line")
    if window.peek():
        raise window.error("something behind its end", window.at)


def _list(index: int, window: _Window) -> Iterator[Chunk]:
    """Yield the rows of the list that begins here."""
    window.take("[", "Expecting '['")
    batch: list[tuple[int, Any]] = []
    number, start = 0, window.position
    going = window.peek() != "]"
    if not going:
        window.at += 1
    while going:
        number += 1
        batch.append((number, window.value()))
        going = window.take(",]", "Expecting ',' delimiter") == ","
        size = window.position - start
        if len(batch) >= CHUNK_ROWS or size >= CHUNK_BYTES or not going:
            yield Rows(index, str(window.path), batch[0][0], size, batch)
            batch, start = [], window.position


def _object(index: int, window: _Window) -> Iterator[Chunk]:
    """Yield the rows of an object that holds a list of rows, or else the object itself; more objects may follow it."""
    name = str(window.path)
    fields: dict[str, Any] = {}
    held = ""
    window.take("{", "Expecting '{'")
    going = window.peek() != "}"
    if not going:
        window.at += 1
    while going:
        if window.peek() != '"':
            raise window.error("Expecting property name enclosed in double quotes", window.at)
        key = window.value()
        window.take(":", "Expecting ':' delimiter")
        if key in HOLDERS and window.peek() == "[":
            if held:
                raise UserError(
                    f"the file holds two lists, {held!r} and {key!r}, and either may be the rows",
                    where=name,
                    fix="write each to a file of its own",
                )
            held = key
            yield from _list(index, window)
        else:
            fields[key] = window.value()
        going = window.take(",}", "Expecting ',' delimiter") == ","
    if held:
        return
    number, start = 1, 0
    yield Rows(index, name, 1, window.position, [(1, fields)])
    while window.peek() == "{":  # objects one behind the other, the first one longer than a block
        number, start = number + 1, window.position
        row = window.value()
        yield Rows(index, name, number, window.position - start, [(number, row)])
