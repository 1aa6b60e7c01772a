"""JSON documents are read as a stream: the same rows, and the same place of an error, as reading them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surogate.data import DatasetSpec, json_rows
from surogate.data.json_rows import read_json
from surogate.data.sources import Source
from surogate.errors import UserError

_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(data: bytes, block: int, name: str = "a.json") -> list[tuple[int, Any]]:
    blocks = iter([data[start : start + block] for start in range(0, len(data), block)])
    return [row for chunk in read_json(0, Path(name), blocks) for row in chunk.rows()]


@given(rows=st.lists(_value, max_size=6), block=st.integers(1, 40), indent=st.none() | st.integers(0, 2),
       escape=st.booleans())  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_a_list_gives_its_items_whatever_the_blocks(rows: list, block: int, indent: int | None, escape: bool) -> None:
    data = json.dumps(rows, indent=indent, ensure_ascii=escape).encode()
    assert read(data, block) == list(enumerate(rows, 1))
    held = json.dumps({"version": [1, 2], "rows": rows, "more": {"rows": 3}}, indent=indent or 1).encode()
    assert read(held, block) == list(enumerate(rows, 1))


@given(text=st.text(st.sampled_from('[]{},:"\\ \n\t1e-.tnué\x00'), max_size=24), block=st.integers(1, 9))
@example(text='[1, {"a": "b}', block=2)
@example(text="[tru, 1]", block=3)
@example(text="[12 3]", block=1)
@settings(deadline=None, max_examples=400)
def test_an_error_is_at_the_same_place_as_in_the_whole(text: str, block: int) -> None:
    text = "[" + text
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        with pytest.raises(UserError) as refusal:
            read(text.encode(), block)
        line, column = (int(part) for part in refusal.value.where.split(":")[1:])
        place = sum(len(part) + 1 for part in text.split("\n")[: line - 1]) + column - 1
        # Newer versions of json point at a trailing comma itself, older ones behind it.
        assert place == error.pos or "trailing comma" in error.msg, (error.msg, str(refusal.value))
    else:
        assert read(text.encode(), block) == list(enumerate(expected, 1))


def test_objects_one_behind_the_other_where_the_first_is_longer_than_a_block() -> None:
    rows = [{"text": "x" * 50}, {"text": "y"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert read(lines, 20) == list(enumerate(rows, 1))


def test_two_lists_of_rows_are_not_chosen_from() -> None:
    with pytest.raises(UserError, match="two lists, 'train' and 'data'"):
        read(b'{"train": [{"text": "x"}],\n "data": [{"text": "y"}]}', 100)


def test_broken_utf8_has_its_place() -> None:
    with pytest.raises(UserError, match=r"a\.json:2:4: not UTF-8: byte 0xff"):
        read('[{"text": "é"},\n "'.encode() + b'a\xff"]', 7)


def test_only_a_part_of_a_large_file_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window never grows beyond a few blocks, however long the list."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": f"{i} " + "x" * 1000} for i in range(20_000)]))  # 20 MB
    most = 0
    original = json_rows._Window.more

    def watched(self: Any) -> bool:
        nonlocal most
        going = original(self)
        most = max(most, len(self.text))
        return going

    monkeypatch.setattr(json_rows._Window, "more", watched)
    sizes = [chunk.size for chunk in Source(DatasetSpec(str(path)), "datasets.0").chunks(False)]
    assert most < 3 * (1 << 22) and max(sizes) < 1.1 * (1 << 20)
    assert abs(sum(sizes) - path.stat().st_size) < 10
