"""Chunks: some rows of a file as plain data that can be sent to a worker process, which takes the rows out of it.

Every row keeps its number in its file (from 1; the line in JSON Lines), so that any message can say ``file:row``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from surogate.errors import UserError

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 500


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file.

    Attributes:
        file: index of the file in its data set.
        name: the file, for messages.
        first: number of the first row.
        size: bytes of the source that it holds, about.
    """

    file: int
    name: str
    first: int
    size: int

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield row numbers and rows."""
        raise NotImplementedError

    def count(self) -> int:
        """Return how many rows there are, without reading them."""
        raise NotImplementedError

    def head(self, count: int) -> Chunk:
        """Return a chunk of the first rows."""
        return Rows(self.file, self.name, self.first, self.size, list(islice(self.rows(), count)))


@dataclass(frozen=True)
class Lines(Chunk):
    """Whole lines of JSON."""

    data: bytes = b""

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first):
            if line and not line.isspace():
                yield number, line

    def rows(self) -> Iterator[tuple[int, Any]]:
        for number, line in self._lines():
            yield number, parse_json(line, self.name, number)

    def count(self) -> int:
        return sum(1 for _ in self._lines())


@dataclass(frozen=True)
class Rows(Chunk):
    """Rows as Python objects, each with its number."""

    values: list[tuple[int, Any]] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[int, Any]]:
        yield from self.values

    def count(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Table(Chunk):
    """Rows as an Arrow record batch in a stream of its own: pickling a batch would send all that it is a slice of."""

    stream: bytes = b""
    length: int = 0

    def rows(self) -> Iterator[tuple[int, Any]]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as reader:
            yield from enumerate((row for batch in reader for row in batch.to_pylist()), start=self.first)

    def count(self) -> int:
        return self.length


@dataclass(frozen=True)
class Segment(Chunk):
    """A stretch of one long document, with some of the text around it; it is no row of its own."""

    before: str = ""
    text: str = ""
    after: str = ""
    opens: bool = False
    last: bool = False


def parse_json(line: bytes, name: str, number: int) -> Any:
    """Parse one line of a file.

    Raises:
        UserError: with ``file:line:column``.
    """
    try:
        return json.loads(decode(line, name, number))
    except json.JSONDecodeError as error:
        where = f"{name}:{number}:{error.colno}"
        raise UserError(f"not valid JSON: {error.msg}", where=where, fix=json_remedy(line)) from None
    except RecursionError:
        raise UserError("JSON that is nested too deeply", where=f"{name}:{number}:1") from None


def json_remedy(around: bytes) -> str:
    """Return what to do about JSON that cannot be read; ``around``: some of it at that place."""
    if any(quote.encode() in around for quote in "“”„＂"):
        return 'replace curly quotes by straight ones (")'
    return "one JSON object a line; a line break inside a text is written \\n"


def decode(data: bytes, name: str, line: int) -> str:
    """Decode UTF-8.

    Raises:
        UserError: with ``file:line:column`` of the first wrong byte.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        raise not_utf8(data[error.start], f"{name}:{line + before.count(10)}:{column}") from None


def not_utf8(byte: int, where: str) -> UserError:
    """Return the error about a byte that no UTF-8 has there."""
    return UserError(
        f"not UTF-8: byte 0x{byte:02x}", where=where, fix="save the file as UTF-8 (iconv -f CODING -t utf-8 FILE)"
    )
