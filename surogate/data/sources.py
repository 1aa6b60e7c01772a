"""Where rows come from: files, folders and hub data sets, read as a stream of chunks.

A chunk is plain data that can be sent to a worker process, which takes the rows out of it. Every row keeps its number
in its file (from 1; the line in JSON Lines), so that any message can say ``file:row``.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from surogate.data.options import DatasetSpec
from surogate.data.stretch import CONTEXT, SEGMENT, cut_before
from surogate.errors import UserError

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 500
_BLOCK = 1 << 22

_KINDS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
    ".txt": "text", ".text": "text", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
_PACKED = (".gz", ".zst")
_SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "validation",
}  # fmt: skip
_HOLDERS = ("data", "rows", "examples", "train")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


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


@dataclass(frozen=True)
class Lines(Chunk):
    """Whole lines of JSON."""

    data: bytes = b""

    def rows(self) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first):
            if line and not line.isspace():
                yield number, parse_json(line, self.name, number)


@dataclass(frozen=True)
class Rows(Chunk):
    """Rows as Python objects, each with its number."""

    values: list[tuple[int, Any]] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[int, Any]]:
        yield from self.values


@dataclass(frozen=True)
class Table(Chunk):
    """Rows as an Arrow record batch."""

    batch: Any = None

    def rows(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self.batch.to_pylist(), start=self.first)


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
        raise UserError(f"not valid JSON: {error.msg}", where=where, fix=_quotes(line)) from None
    except RecursionError:
        raise UserError("JSON that is nested too deeply", where=f"{name}:{number}:1") from None


def _quotes(line: bytes) -> str:
    if any(quote.encode() in line for quote in "“”„＂"):
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
        raise UserError(
            f"not UTF-8: byte 0x{data[error.start]:02x}",
            where=f"{name}:{line + before.count(10)}:{column}",
            fix="save the file as UTF-8 (iconv -f CODING -t utf-8 FILE)",
        ) from None


class Source:
    """One data set of the configuration.

    Args:
        spec: what the user wrote.
        where: its key, for messages (``datasets.0``).

    Raises:
        UserError: nothing there, or no file that can be read.
    """

    def __init__(self, spec: DatasetSpec, where: str) -> None:
        self.spec, self.where = spec, where
        self.notes: list[str] = []
        self.files: list[Path] = []
        self._hub: Any = None
        path = Path(spec.path).expanduser()
        if path.is_dir():
            self.files = self._folder(path)
        elif path.is_file():
            self.files = [path]
        elif any(char in spec.path for char in "*?["):
            self.files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not self.files:
                raise UserError(f"no file matches {spec.path!r}", where=where)
        elif not self._may_be_on_hub(path):
            raise UserError(f"there is no file {spec.path!r}", where=f"{where}.path", fix="check the path")
        if self.files and spec.split and "[" in spec.split:
            raise UserError(
                f"split {spec.split!r} asks for a part of a local file",
                where=f"{where}.split",
                fix="write samples: N to take the first N rows",
            )

    def _may_be_on_hub(self, path: Path) -> bool:
        known = {*_KINDS, *_PACKED} & set(path.suffixes)
        return _HUB_ID.fullmatch(self.spec.path) is not None and not known

    def _folder(self, folder: Path) -> list[Path]:
        found = sorted(p for p in folder.rglob("*") if p.is_file() and not any(x.startswith(".") for x in p.parts[1:]))
        data = [p for p in found if kind_of(p) is not None]
        if (folder / "dataset_info.json").is_file() or (folder / "state.json").is_file():
            data = [p for p in data if kind_of(p) != "json"]  # a data set saved by the datasets library
        kinds = sorted({str(kind_of(p)) for p in data})
        if len(kinds) > 1:
            raise UserError(
                f"the folder holds several kinds of data files: {', '.join(kinds)}",
                where=str(folder),
                fix=f"name one kind: path: {folder}/*{data[0].suffix}",
            )
        if not data:
            others = ", ".join(p.name for p in found[:5]) or "nothing"
            raise UserError(
                "the folder holds no data file", where=str(folder), expected=f"{', '.join(_KINDS)} (found: {others})"
            )
        other = [p.name for p in found if p not in data]
        if other:
            more = ", …" if len(other) > 5 else ""
            self.notes.append(f"{folder}: {len(other)} other files are not read ({', '.join(other[:5])}{more})")
        return self._of_split(folder, data)

    def _of_split(self, folder: Path, data: list[Path]) -> list[Path]:
        """Where files are named after splits, as on the hub, take those of the split that is asked for."""

        def split_of(path: Path) -> str | None:
            words = re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())
            return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)

        splits = {path: split_of(path) for path in data}
        names = sorted({name for name in splits.values() if name})
        if not names:
            return data
        wanted = _SPLIT_WORDS.get(self.spec.split or "train", self.spec.split)
        chosen = [path for path, name in splits.items() if name == wanted]
        if not chosen:
            raise UserError(
                f"the folder has no files of the split {self.spec.split or 'train'!r}",
                where=str(folder),
                expected=f"one of the splits that its files are named after: {', '.join(names)}",
            )
        if len(chosen) < len(data):
            self.notes.append(f"{folder}: {len(chosen)} of {len(data)} files are of the split {wanted}")
        return chosen

    # Identity

    def names(self) -> list[str]:
        """Return the names of the files, as messages show them."""
        return [str(path) for path in self.files] or [self.spec.path]

    def key(self, hash_file: Callable[[Path], str]) -> dict[str, Any]:
        """Return what the rows depend on, as plain data. Opens the data set if it is on the hub."""
        spec = self.spec
        return {
            "contents": [hash_file(path) for path in self.files] or [self._hub_data()._fingerprint],
            "kinds": [path.suffixes for path in self.files],
            "type": spec.type,
            "samples": spec.samples,
            "fields": dict(spec.fields),
        }

    def size(self) -> int:
        """Return the bytes of all files; 0 if unknown."""
        return sum(path.stat().st_size for path in self.files)

    # Reading

    def chunks(self, segments: bool) -> Iterator[Chunk]:
        """Yield the data set chunk by chunk.

        Args:
            segments: hand long text files over in stretches; else a text file is one row.

        Raises:
            UserError: a file is damaged, or the hub cannot be reached.
        """
        left = self.spec.samples
        for chunk in self._all(segments):
            if left is None:
                yield chunk
            elif isinstance(chunk, Segment):
                yield chunk
                left -= chunk.last
                if left == 0:
                    return
            else:
                rows = list(islice(chunk.rows(), left))
                left -= len(rows)
                yield Rows(chunk.file, chunk.name, chunk.first, chunk.size, rows)
                if left == 0:
                    return

    def _all(self, segments: bool) -> Iterator[Chunk]:
        if not self.files:
            yield from _hub_chunks(self._hub_data(), self.spec.path)
        for index, path in enumerate(self.files):
            name = str(path)
            kind = kind_of(path) or {"json": "json", "text": "text"}.get(self.spec.type)
            if kind is None:
                raise UserError(
                    f"files that end in {path.suffix or 'nothing'!r} are not known",
                    where=name,
                    expected=f"{', '.join(_KINDS)}; also with .gz or .zst",
                    fix="type: json or type: text says what the file is",
                )
            if path.stat().st_size == 0:
                raise UserError("the file is empty", where=name)
            if kind == "json":
                yield from _json(index, path)
            elif kind == "csv":
                yield from _csv(index, path)
            elif kind == "text":
                yield from _text(index, path, segments)
            else:
                yield from _columnar(index, path, kind)

    def _hub_data(self) -> Any:
        if self._hub is None:
            self._hub = _load_from_hub(self.spec, self.where)
        return self._hub


def kind_of(path: Path) -> str | None:
    """Return ``json``, ``csv``, ``parquet``, ``arrow`` or ``text`` by the file's ending, ``None`` if it is another."""
    name = path.name.lower()
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return _KINDS.get(Path(name).suffix)


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


def _blocks(path: Path) -> Iterator[bytes]:
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


def _json(index: int, path: Path) -> Iterator[Chunk]:
    """JSON Lines, or one JSON document that holds the rows: what is in the file decides, not its ending alone."""
    blocks = _blocks(path)
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
        yield from _json_document(index, path, b"".join([head, *blocks]))
    else:
        yield from _json_lines(index, path, chain([head], blocks))


def _json_lines(index: int, path: Path, blocks: Iterator[bytes]) -> Iterator[Chunk]:
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


def _json_document(index: int, path: Path, data: bytes) -> Iterator[Chunk]:
    text = decode(data, str(path), 1)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        near = text[max(0, error.pos - 99) : error.pos + 99].encode()
        raise UserError(f"not valid JSON: {error.msg}", where=where, fix=_quotes(near)) from None
    except RecursionError:
        raise UserError("JSON that is nested too deeply", where=str(path)) from None
    if isinstance(value, dict):
        value = next((value[key] for key in _HOLDERS if isinstance(value.get(key), list)), [value])
    if not isinstance(value, list):
        raise UserError("the file holds no rows", where=str(path), expected="a list of objects, or one object a line")
    yield from _numbered(index, path, enumerate(value, start=1), len(data) // max(1, len(value)))


def _numbered(index: int, path: Path, rows: Iterator[tuple[int, Any]], row_size: int) -> Iterator[Chunk]:
    while batch := list(islice(rows, CHUNK_ROWS)):
        yield Rows(index, str(path), batch[0][0], row_size * len(batch), batch)


def _csv(index: int, path: Path) -> Iterator[Chunk]:
    """Comma-separated (``.tsv``: tab-separated) values with a line of names. Rows are numbered by their first line."""
    csv.field_size_limit(1 << 30)
    stream = io.TextIOWrapper(open_packed(path), encoding="utf-8-sig", newline="")
    with stream:
        reader = csv.reader(stream, delimiter="\t" if ".tsv" in path.suffixes else ",", strict=True)
        try:
            names = next(reader, [])
            yield from _numbered(index, path, _csv_rows(reader, names, path), 0)
        except csv.Error as error:
            raise UserError(f"not valid CSV: {error}", where=f"{path}:{reader.line_num}") from None
        except UnicodeDecodeError as error:
            where = f"{path}:{reader.line_num + 1} or later"
            raise UserError(f"not UTF-8: byte 0x{error.object[error.start]:02x}", where=where) from None


def _csv_rows(reader: Any, names: list[str], path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    line = reader.line_num + 1
    for values in reader:
        if values:
            if len(values) != len(names):
                raise UserError(
                    f"{len(values)} values",
                    where=f"{path}:{line}",
                    expected=f"{len(names)}, as many as the first line has names",
                )
            yield line, dict(zip(names, values, strict=True))
        line = reader.line_num + 1


def _text(index: int, path: Path, segments: bool) -> Iterator[Chunk]:
    """A text file is one document."""
    name = str(path)
    if not segments:
        text = decode(b"".join(_blocks(path)), name, 1)
        yield Rows(index, name, 1, len(text), [(1, {"text": text})])
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    before, text, opens, lines = "", "", True, 1
    for block in chain(_blocks(path), [b""]):
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
            with pq.ParquetFile(path) as file:
                yield from _batches(index, path, file.iter_batches(CHUNK_ROWS))
            return
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_stream(source)
                yield from _batches(index, path, iter(reader))
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                yield from _batches(index, path, (file.get_batch(i) for i in range(file.num_record_batches)))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"not a readable {kind} file: {error}", where=str(path)) from None


def _batches(index: int, path: Path | str, batches: Iterator[Any]) -> Iterator[Chunk]:
    first = 1
    for whole in batches:
        for start in range(0, whole.num_rows, CHUNK_ROWS):
            batch = whole.slice(start, CHUNK_ROWS)
            yield Table(index, str(path), first, batch.nbytes, batch)
            first += batch.num_rows


def _hub_chunks(data: Any, name: str) -> Iterator[Chunk]:
    tables = data.with_format("arrow").iter(CHUNK_ROWS)
    yield from _batches(0, name, (batch for table in tables for batch in table.to_batches()))


def _load_from_hub(spec: DatasetSpec, where: str) -> Any:
    """Open a data set of the hub, from the cache of the ``datasets`` library where it is complete.

    Raises:
        UserError: the library is not installed, or there is no such data set, or it cannot be fetched.
    """
    offline = (
        f"check the name and the network. Without network: download it elsewhere (hf download --repo-type dataset "
        f"{spec.path} --local-dir DIR), copy DIR here and write path: DIR"
    )
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{spec.path!r} is no local file, and data sets of the hub need the datasets library",
            where=f"{where}.path",
            fix="pip install datasets, or give the path of a local file",
        ) from None
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(spec.path, spec.subset, split=spec.split or "train")
    except Exception as error:  # network, cache, hub and parsing errors have no common class
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{spec.path!r} is no local file, and the hub does not give such a data set: {text}",
            where=f"{where}.path",
            fix=offline,
        ) from None
