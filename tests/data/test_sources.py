"""Files, folders and packed files are read row by row, and every row keeps its place."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate.data import DatasetSpec, json_rows, readers
from surogate.data.chunks import Segment
from surogate.data.sources import Source
from surogate.data.stretch import cut_before, stretches
from surogate.errors import UserError

ROWS = [{"text": f"row {i} é😀\n"} for i in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def read(path: Path | str, segments: bool = False, **spec: Any) -> list[tuple[int, Any]]:
    source = Source(DatasetSpec(str(path), **spec), "datasets.0")
    return [row for chunk in source.chunks(segments) for row in chunk.rows()]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _table() -> pa.Table:
    return pa.Table.from_pylist(ROWS)


def _csv(path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["text"], *([row["text"]] for row in ROWS)])


def _arrow(path: Path, new: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink, new(sink, _table().schema) as writer:
        writer.write_table(_table())


WRITERS = {
    "a.jsonl": lambda p: p.write_bytes(LINES),
    "b.jsonl": lambda p: p.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"}\n", b"}\r\n")),
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(LINES, mtime=0)),
    "a.jsonl.zst": lambda p: p.write_bytes(pa.compress(LINES, "zstd", asbytes=True)),
    "lines.json": lambda p: p.write_bytes(LINES),
    "array.json": lambda p: p.write_text(json.dumps(ROWS, indent=2)),
    "array.jsonl": lambda p: p.write_text(json.dumps(ROWS)),
    "held.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS})),
    "held_lines.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1)),
    "a.csv": _csv,
    "a.parquet": lambda p: pq.write_table(_table(), p, row_group_size=2),
    "stream.arrow": lambda p: _arrow(p, pa.ipc.new_stream),
    "file.arrow": lambda p: _arrow(p, pa.ipc.new_file),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    rows = read(tmp_path / name)
    assert [row for _, row in rows] == ROWS
    # A text with a line break takes two lines of a CSV, and the first line has the names.
    assert [number for number, _ in rows] == ([2, 4, 6, 8, 10] if name == "a.csv" else [1, 2, 3, 4, 5])


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30), block=st.integers(1, 64), chunk=st.integers(1, 64)
)
@settings(deadline=None, max_examples=60)
def test_lines_keep_their_numbers_whatever_the_blocks(
    lengths: list[int], block: int, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"x": "y" * n}) if n else "" for n in lengths) + " ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK", block)
        patch.setattr(json_rows, "CHUNK_BYTES", chunk)
        rows = read(path)
    assert [(number, len(row["x"])) for number, row in rows] == [(i, n) for i, n in enumerate(lengths, 1) if n]


def test_one_object_a_file_and_nothing_else(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.json", b'{\n "text":\n "x"}')) == [(1, {"text": "x"})]
    row = {"messages": [{"role": "user", "content": "x"}]}
    assert read(write(tmp_path / "b.json", json.dumps(row).encode())) == [(1, row)]


def test_samples_stop_early(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINES[: len(LINES) // 2] + b"this is no JSON\n")
    assert read(write(tmp_path / "b.jsonl", b"\n" + LINES), samples=2) == [(2, ROWS[0]), (3, ROWS[1])]
    assert len(read(path, samples=1)) == 1


def test_folder_with_splits_and_other_files(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        write(tmp_path / "data" / name, LINES)
    write(tmp_path / "README.md", b"hello")
    write(tmp_path / ".cache" / "x.csv", b"hello")
    source = Source(DatasetSpec(str(tmp_path)), "datasets.0")
    assert [p.name for p in source.files] == ["train-0.jsonl", "train-1.jsonl"]
    assert any("README.md" in note for note in source.notes) and any("2 of 3" in note for note in source.notes)
    assert len(read(tmp_path, split="test")) == 5
    with pytest.raises(UserError, match="no files of the split"):
        Source(DatasetSpec(str(tmp_path), split="validation"), "datasets.0")


def test_folder_without_splits_is_read_whole_and_patterns_choose(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", LINES)
    write(tmp_path / "b.jsonl", LINES)
    assert len(read(tmp_path)) == 10
    assert len(read(tmp_path / "b*.jsonl")) == 5


def test_folder_saved_by_the_datasets_library(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert [row for _, row in read(tmp_path / "saved")] == ROWS


def test_hub_data_set_by_way_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(path: str, subset: str | None, split: str) -> Any:
        asked.append((path, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = read("someone/something", subset="small", split="train[:5]")
    assert rows == list(enumerate(ROWS, 1)) and asked == [("someone/something", "small", "train[:5]")]


def test_text_file_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i} é😀 words\n" for i in range(2000))
    path = write(tmp_path / "a.txt", text.encode())
    monkeypatch.setattr(readers, "SEGMENT", 1000)
    monkeypatch.setattr(readers, "_BLOCK", 777)  # cuts through characters
    parts = list(Source(DatasetSpec(str(path)), "datasets.0").chunks(True))
    assert all(isinstance(part, Segment) for part in parts) and len(parts) > 20
    assert "".join(part.text for part in parts) == text
    assert [part.opens for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    for before, after in zip(parts, parts[1:], strict=False):
        assert before.after and after.text.startswith(before.after)
        assert after.before and before.text.endswith(after.before)
    assert read(path) == [(1, {"text": text})]


@given(text=st.text(st.sampled_from("ab \n\t"), max_size=300), length=st.integers(2, 50))
@settings(deadline=None)
def test_stretches_are_a_partition(text: str, length: int) -> None:
    cuts = list(stretches(text, length))
    assert "".join(text[a:b] for a, b in cuts) == text
    assert all(0 < b - a <= length for a, b in cuts)


def test_cuts_are_made_after_lines_then_before_words() -> None:
    assert cut_before("aaa\nbbb ccc", 0, 9) == 4
    assert cut_before("aaa\n  bbb ccc", 0, 11) == 9  # not between a line's end and the indent of the next
    assert cut_before("aaaaaaaa", 0, 5) == 5


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": \xe2\x80\x9cx\xe2\x80\x9d}\n',
            r"a\.jsonl:2:10: not valid JSON(.|\n)*curly",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl:2:11: not UTF-8: byte 0xff"),
        ("a.jsonl", b'{"text": "a\nb"}\n', r"a\.jsonl:1:10: not valid JSON"),
        ("a.json", b'[\n {"text": "x"},\n {"text" "y"}\n]', r"a\.json:3:10: not valid JSON"),
        ("a.json", b'"text"', "no rows"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", "{}".encode("utf-16"), "the file is UTF-16"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv:3: 3 values"),
        ("a.csv", b'a,b\n"x"y,2\n', r"a\.csv:2: not valid CSV"),
        ("a.csv", b"a,b\n1,\xff\n", "not UTF-8: byte 0xff"),
        ("a.txt", b"fine\nnot \xff fine", r"a\.txt:2:5: not UTF-8"),
        ("a.parquet", b"nonsense", "not a readable parquet file"),
        ("a.arrow", b"nonsense", "not a readable arrow file"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-12], "cannot be read to its end"),
        ("a.jsonl.zst", b"nonsense", "cannot be read to its end"),
        ("a.xlsx", b"nonsense", "files that end in '.xlsx' are not known"),
    ],
)
def test_damaged_files(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, data)
    with pytest.raises(UserError, match=words):
        read(path)
    if name.endswith(".txt"):
        with pytest.raises(UserError, match=words):
            read(path, segments=True)


def test_places_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="no file matches"):
        read(tmp_path / "*.jsonl")
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UserError, match="holds no data file(.|\n)*notes.md"):
        read(tmp_path)
    write(tmp_path / "a.csv", b"a\n1\n")
    write(tmp_path / "a.jsonl", LINES)
    with pytest.raises(UserError, match="several kinds"):
        read(tmp_path)
    with pytest.raises(UserError, match="samples: N"):
        read(tmp_path / "a.jsonl", split="train[:3]")


def test_hub_that_gives_nothing_says_what_to_do_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match="Couldn't reach the hub(.|\n)*Without network"):
        read("someone/something")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_chunk_of_a_table_is_sent_without_the_rest_of_the_table(kind: str, tmp_path: Path) -> None:
    """One batch of 10 MB: its chunks are about 1 MB each, in memory and pickled."""
    rows = [{"text": f"{i} " + "x" * 1000} for i in range(10_000)]
    path = tmp_path / f"a.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    parts = list(Source(DatasetSpec(str(path)), "datasets.0").chunks(False))
    assert max(len(pickle.dumps(part)) for part in parts) < 1.2 * (1 << 20) and len(parts) >= 10
    assert sum(part.count() for part in parts) == 10_000
    assert [row for part in parts for row in pickle.loads(pickle.dumps(part)).rows()] == list(enumerate(rows, 1))


def test_samples_take_whole_chunks_unread_and_the_rest_row_by_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\n".join([LINES.rstrip(b"\n")] * 3) + b"\n\n{broken\n")
    for samples in (1, 5, 7, 15):
        assert len(read(path, samples=samples)) == samples
    with pytest.raises(UserError, match=r"a\.jsonl:17:2"):
        read(path, samples=16)
