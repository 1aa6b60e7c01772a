"""Bad input through ``surogate tokenize``: exit code 2 and one message with place and remedy; and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from surogate.cli import main
from tests.data.samples import STYLES, chat, write_rows

GOOD = chat("user: a", "assistant: b")
LINE = json.dumps(GOOD)


def turns(*pairs: tuple[str, object]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]})


def lines(*rows: str | bytes) -> bytes:
    return b"".join((row.encode() if isinstance(row, str) else row) + b"\n" for row in rows)


def long_row() -> bytes:
    return lines(json.dumps({"messages": [*GOOD["messages"], {"role": "assistant", "content": "word " * 20_000_000}]}))


# What the file is called, its contents, and words of the one message.
FILES: dict[str, tuple[str, Callable[[], bytes], tuple[str, ...]]] = {
    "not JSON": ("d.jsonl", lambda: lines(LINE, '{"messages": }'), ("d.jsonl:2:14: not valid JSON", "one JSON object")),
    "JSON cut short": ("d.json", lambda: f"[{LINE},\n {LINE[:-9]}".encode(), ("d.json:2:", "not valid JSON")),
    "curly quotes": ("d.jsonl", lambda: lines(LINE, LINE.replace('"', "”")), ("d.jsonl:2:2", "straight ones")),
    "no object": ("d.jsonl", lambda: lines("[1]\n2\n3"), ("d.jsonl:2:1", "not valid JSON")),
    "numbers": ("d.jsonl", lambda: lines("1", "2"), ("d.jsonl: the rows are no objects",)),
    "types mixed in a column": (
        "d.jsonl",
        lambda: lines(LINE, '{"messages": 3}', '{"messages": "text"}', '{"messages": {"role": "user"}}'),
        ("d.jsonl:2", "3 of 4 rows", "'messages' is a number", "'messages' is text", "'messages' is an object"),
    ),
    "null content": (
        "d.jsonl",
        lambda: lines(LINE, *[turns(("user", None), ("assistant", "b"))] * 2),
        ("2 of 3 rows", "a turn's content is null; for example", "d.jsonl:2", "turn 1 (user)"),
    ),
    "unknown role": (
        "d.jsonl",
        lambda: lines(LINE, *[turns(("narrator", "x"), ("assistant", "b"))] * 2),
        ("unknown role 'narrator'", "d.jsonl:2", "known roles: system"),
    ),
    "broken UTF-8": (
        "d.jsonl",
        lambda: lines(LINE, b'{"text": "\xf0\x9f\x98"}'),
        ("d.jsonl:2:11: not UTF-8: byte 0xf0",),
    ),
    "half of an emoji": (
        "d.jsonl",
        lambda: lines(*[turns(("user", "x"), ("assistant", "\ud83d"))] * 2),
        ("half of a surrogate pair", "d.jsonl:1"),
    ),
    "UTF-16": ("d.jsonl", lambda: LINE.encode("utf-16"), ("the file is UTF-16", "iconv")),
    "a row of 100 MB": ("d.jsonl", long_row, ("none of the 1 rows", "longer than sequence_len", "raise sequence_len")),
    "an empty file": ("d.jsonl", lambda: b"", ("d.jsonl: the file is empty",)),
    "blank lines": ("d.jsonl", lambda: b"\n \n", ("there are no rows",)),
    "an empty list": ("d.json", lambda: b"[]", ("there are no rows",)),
    "a CSV with a comma too many": ("d.csv", lambda: b"text\na\nb,c\n", ("d.csv:3: 2 values", "expected: 1")),
    "no Parquet": ("d.parquet", lambda: b"PAR1 nonsense", ("not a readable parquet file",)),
    "an archive cut short": ("d.jsonl.gz", lambda: b"\x1f\x8b\x08\x00", ("cannot be read to its end",)),
    "foreign ending": ("d.docx", lambda: b"PK", ("files that end in '.docx' are not known", "type: json")),
    "preference pairs": ("d.jsonl", lambda: lines('{"chosen": "a", "rejected": "b"}'), ("preference pairs",)),
    "foreign fields": ("d.jsonl", lambda: lines('{"frage": "a"}'), ("not recognised", "found: frage")),
}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``surogate tokenize`` on a path and returns the message, whose form it checks."""

    def run(path: Path | str, style: str = "chatml", **options: object) -> str:
        model = STYLES[style].write(tmp_path / "model")
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000}))
        config = {"model": str(model), "cache_dir": str(tmp_path / "cache"), "datasets": [{"path": str(path)}]}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({**config, "dataset_num_workers": 1, **options}))
        assert main(["tokenize", str(tmp_path / "c.yaml")]) == 2
        message = capsys.readouterr().err
        assert message.count("fix: ") <= 1 and "Traceback" not in message
        assert not [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()]  # nothing half done stays
        return message

    return run


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    name, data, words = FILES[case]
    (tmp_path / name).write_bytes(data())
    message = refused(tmp_path / name)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("style", "row", "words"),
    [
        (
            "mistral",
            chat("user: a", "user: b", "assistant: c"),
            ("roles must alternate", "roles: user, user, assistant"),
        ),
        ("gemma", chat("system: a", "user: b", "assistant: c"), ("System role not supported", "chat_template")),
    ],
)
def test_roles_in_an_order_that_the_template_refuses(
    style: str, row: dict, words: tuple[str, ...], tmp_path: Path, refused: Callable[..., str]
) -> None:
    message = refused(write_rows(tmp_path / "d.jsonl", [row, row, GOOD]), style)
    assert all(word in message for word in words) and "d.jsonl:1" in message and "2 of 3 rows" in message


def test_folders(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    assert "the folder holds no data file" in refused(folder)
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    (folder / "notes.md").write_text("x")
    assert "found: notes.md, photo.jpg" in refused(folder)
    write_rows(folder / "a.jsonl", [GOOD])
    (folder / "b.csv").write_text("text\nx\n")
    assert "several kinds of data files: csv, json" in refused(folder)


def test_emoji_and_foreign_files_are_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other side of the cases above: whole rows next to files of other kinds are read, and what is not is named."""
    folder = tmp_path / "data"
    write_rows(folder / "a.jsonl", [chat("user: 😀é漢\u0007", "assistant: 👩‍👩‍👧")])
    (folder / "README.md").write_text("x")
    model = STYLES["chatml"].write(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000}))
    (tmp_path / "c.yaml").write_text(f"model: {model}\ncache_dir: {tmp_path}/cache\ndatasets: [{{path: {folder}}}]\n")
    assert main(["tokenize", str(tmp_path / "c.yaml"), "--show", "1"]) == 0
    output = capsys.readouterr().out
    assert "user\n😀é漢␇<|im_end|>" in output and "[[👩‍👩‍👧<|im_end|>]]" in output
    assert "1 other files are not read (README.md)" in output


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    """The hub's own libraries, told that there is no network (without being told they try for half a minute)."""
    model = STYLES["chatml"].write(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000}))
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {model}\ncache_dir: {tmp_path}/cache\ndatasets: [{{path: someone/something}}]\n")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "surogate", "tokenize", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "'someone/something' is no local file, and the hub" in done.stderr
    assert "Without network: download it elsewhere" in done.stderr and "datasets.0.path" in done.stderr


def test_paths_that_are_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "cache" / "tokens").mkdir(parents=True)
    assert "there is no file 'nowhere.jsonl'" in refused("nowhere.jsonl")
    assert "no file matches" in refused(tmp_path / "*.jsonl")
