"""Files of every kind to chunks, a bounded part of the file in memory at a time."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from surogate.data.chunks import CHUNK_BYTES, CHUNK_ROWS, Chunk, Rows, Segment, Table, decode
from surogate.data.stretch import CONTEXT, SEGMENT, cut_before
from surogate.errors import UserError

KINDS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
    ".txt": "text", ".text": "text", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
PACKED = (".gz", ".zst")

_BLOCK = 1 << 22
_WHOLE_TEXT = 1 << 28  # bytes; a text file beyond is no row of a sensible length


def kind_of(path: Path) -> str | None:
    """Return ``json``, ``csv``, ``parquet``, ``arrow`` or ``text`` by the file's ending, ``None`` if it is another."""
    name = path.name.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return KINDS.get(Path(name).suffix)


def read_file(index: int, path: Path, kind: str, segments: bool) -> Iterator[Chunk]:
    """Yield the chunks of a file.

    Args:
        index: of the file in its data set.
        path: of the file.
        kind: as :func:`kind_of` names it.
        segments: hand text files over in stretches; else a text file is one row.

    Raises:
        UserError: the file is damaged.
    """
    if kind == "json":
        from surogate.data.json_rows import read_json

        yield from read_json(index, path, blocks(path))
    elif kind == "csv":
        yield from _csv(index, path)
    elif kind == "text":
        yield from _text(index, path, segments)
    else:
        yield from _columnar(index, path, kind)


def open_packed(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked if it ends in ``.gz`` or ``.zst``.

    Raises:
        UserError: it cannot be opened, or unpacking needs a library that is not installed.
    """
    try:
        if path.suffix == ".gz":
            import gzip

            return gzip.open(path, "rb")  # type: ignore[return-value]
        if path.suffix == ".zst":
            try:
                import pyarrow
            except ImportError:
                raise UserError("reading .zst needs pyarrow", where=str(path), fix="pip install pyarrow") from None
            stream: IO[bytes] = pyarrow.input_stream(str(path), compression="zstd")
            return stream
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot be opened: {error.strerror}", where=str(path)) from None


def _read(stream: IO[bytes], path: Path, size: int) -> bytes:
    try:
        return stream.read(size)
    except Exception as error:  # gzip, zlib and zstandard each raise their own
        raise UserError(f"cannot be read to its end: {error}", where=str(path)) from None


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file block by block, unpacked and without byte order mark.

    Raises:
        UserError: it is damaged, or UTF-16.
    """
    with open_packed(path) as stream:
        head = _read(stream, path, _BLOCK)
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(
                "the file is UTF-16", where=str(path), expected="UTF-8", fix="iconv -f utf-16 -t utf-8 FILE > NEW"
            )
        head = head.removeprefix(b"\xef\xbb\xbf")
        while head:
            yield head
            head = _read(stream, path, _BLOCK)


def _csv(index: int, path: Path) -> Iterator[Chunk]:
    """Comma-separated (``.tsv``: tab-separated) values with a line of names. Rows are numbered by their first line."""
    csv.field_size_limit(1 << 30)
    stream = io.TextIOWrapper(open_packed(path), encoding="utf-8-sig", newline="")
    with stream:
        reader = csv.reader(stream, delimiter="\t" if ".tsv" in path.suffixes else ",", strict=True)
        try:
            names = next(reader, [])
            yield from _gathered(index, path, _csv_rows(reader, names, path))
        except csv.Error as error:
            raise UserError(f"not valid CSV: {error}", where=f"{path}:{reader.line_num}") from None
        except UnicodeDecodeError as error:
            where = f"{path}:{reader.line_num + 1} or later"
            raise UserError(f"not UTF-8: byte 0x{error.object[error.start]:02x}", where=where) from None


def _csv_rows(reader: Any, names: list[str], path: Path) -> Iterator[tuple[int, dict[str, str], int]]:
    line = reader.line_num + 1
    for values in reader:
        if values:
            if len(values) != len(names):
                raise UserError(
                    f"{len(values)} values",
                    where=f"{path}:{line}",
                    expected=f"{len(names)}, as many as the first line has names",
                )
            yield line, dict(zip(names, values, strict=True)), sum(map(len, values)) + len(values)
        line = reader.line_num + 1


def _gathered(index: int, path: Path, rows: Iterator[tuple[int, Any, int]]) -> Iterator[Chunk]:
    """Gather rows (number, row, size) to chunks of a bounded number and size."""
    batch: list[tuple[int, Any]] = []
    total = 0
    for number, row, size in rows:
        batch.append((number, row))
        total += size
        if len(batch) >= CHUNK_ROWS or total >= CHUNK_BYTES:
            yield Rows(index, str(path), batch[0][0], total, batch)
            batch, total = [], 0
    if batch:
        yield Rows(index, str(path), batch[0][0], total, batch)


def _text(index: int, path: Path, segments: bool) -> Iterator[Chunk]:
    """A text file is one document."""
    name = str(path)
    if not segments:
        if path.stat().st_size > _WHOLE_TEXT:
            raise UserError(
                f"a text file is one row, and this one has {path.stat().st_size / 1e6:,.0f} MB",
                where=name,
                fix="surogate pt, or truncation: split, trains on it piece by piece",
            )
        text = decode(b"".join(blocks(path)), name, 1)
        yield Rows(index, name, 1, len(text), [(1, {"text": text})])
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    before, text, opens, lines = "", "", True, 1
    for block in chain(blocks(path), [b""]):
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            decode(text.encode() + error.object, name, lines)
            raise
        while len(text) > 2 * SEGMENT or (not block and text):
            end = cut_before(text, SEGMENT // 2, SEGMENT) if len(text) > 2 * SEGMENT else len(text)
            own, text = text[:end], text[end:]
            last = not block and not text
            yield Segment(index, name, 1, len(own), before, own, text[:CONTEXT], opens, last)
            lines += own.count("\n")
            before, opens = (before + own)[-CONTEXT:], False


def _columnar(index: int, path: Path, kind: str) -> Iterator[Chunk]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"reading {kind} files needs pyarrow", where=str(path), fix="pip install pyarrow") from None
    try:
        if kind == "parquet":
            # Without buffering ahead: it would hold a whole row group, which may be as large as the file.
            with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
                yield from batches_to_chunks(index, str(path), file.iter_batches(CHUNK_ROWS))
            return
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_stream(source)
                yield from batches_to_chunks(index, str(path), iter(reader))
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
                yield from batches_to_chunks(index, str(path), batches)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"not a readable {kind} file: {error}", where=str(path)) from None


def batches_to_chunks(index: int, name: str, batches: Iterator[Any]) -> Iterator[Chunk]:
    """Yield the rows of Arrow record batches in chunks of a bounded number and size."""
    import pyarrow as pa

    first = 1
    for whole in batches:
        rows = max(1, min(CHUNK_ROWS, whole.num_rows * CHUNK_BYTES // max(1, whole.nbytes)))
        for start in range(0, whole.num_rows, rows):
            batch = whole.slice(start, rows)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            stream = sink.getvalue().to_pybytes()
            yield Table(index, name, first, batch.nbytes, stream, batch.num_rows)
            first += batch.num_rows
