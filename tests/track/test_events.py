"""The event file: valid JSON on every line whatever the numbers are, readable while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.config import make_config
from surogate.errors import UserError
from surogate.track import start
from surogate.track.events import NAMES, Events
from surogate.track.events import __doc__ as events_doc


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    events = Events(tmp_path / "e.jsonl", clock=lambda: 12.3456)
    events.emit("warning", message="größer\nals ‘x’")
    assert read(tmp_path / "e.jsonl") == [{"event": "warning", "time": 12.346, "message": "größer\nals ‘x’"}]
    events.emit("run_end", status="done")
    assert len(read(tmp_path / "e.jsonl")) == 2
    events.close()


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    with Events(tmp_path / "e.jsonl") as events:
        events.emit(
            "step",
            loss=float("nan"),
            grad_norm=np.float32("inf"),
            lr=np.float64(0.5),
            step=np.int64(3),
            nested={"a": [float("-inf"), np.arange(2)], 4: (True, None)},
            path=tmp_path,
        )
    (record,) = read(tmp_path / "e.jsonl")
    del record["time"]
    assert record == {
        "event": "step",
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
        "step": 3,
        "nested": {"a": [None, [0, 1]], "4": [True, None]},
        "path": str(tmp_path),
    }


def test_listeners_get_what_the_file_gets(tmp_path: Path) -> None:
    seen: list[tuple[str, Any]] = []
    with Events(None, listeners=[lambda event, fields: seen.append((event, fields))]) as events:
        events.emit("eval", loss=float("nan"), step=np.int32(2))
    assert seen == [("eval", {"loss": None, "step": 2})]


def test_a_second_run_is_added(tmp_path: Path) -> None:
    for _ in range(2):
        with Events(tmp_path / "e.jsonl") as events:
            events.emit("run_start", mode="sft")
    assert len(read(tmp_path / "e.jsonl")) == 2


def test_a_full_disk_does_not_stop_the_run() -> None:
    """/dev/full answers every write with ENOSPC."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    seen: list[tuple[str, Any]] = []
    with Events("/dev/full", listeners=[lambda event, fields: seen.append((event, fields))]) as events:
        events.emit("step", step=1)
        events.emit("step", step=2)
    assert [event for event, _ in seen] == ["warning", "step", "step"]
    assert "No space left" in seen[0][1]["message"]


def test_a_listener_that_fails_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def bad(event: str, fields: Any) -> None:
        raise KeyError("loss")

    with Events(tmp_path / "e.jsonl", [bad, lambda event, fields: seen.append(event)]) as events:
        events.emit("step", step=1)
        events.emit("step", step=2)
    assert seen == ["warning", "step", "step"]
    assert [record["event"] for record in read(tmp_path / "e.jsonl")] == ["step", "warning", "step"]
    assert "function failed at step and is switched off: KeyError('loss')" in capsys.readouterr().err


def test_unknown_event() -> None:
    with pytest.raises(ValueError, match="no event is called"):
        Events(None).emit("stepp")


def test_every_event_is_described() -> None:
    assert events_doc is not None
    for name in NAMES:
        assert f"``{name}``" in events_doc


def test_a_run_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    config = make_config({"model": "m", "datasets": [{"path": "d"}], "output_dir": str(tmp_path / "a" / "out")})
    file = tmp_path / "a" / "out" / "events.jsonl"
    with pytest.raises(RuntimeError), start(config, "sft"):
        assert read(file)[-1]["run_name"] == "out"
        raise RuntimeError("x")
    with pytest.raises(KeyboardInterrupt), start(config, "pt"):
        raise KeyboardInterrupt
    with start(config, "sft") as events:
        events.emit("run_end", steps=1, kind="model", path="p")
    found = [(r["event"], r.get("mode"), r.get("status"), r.get("error")) for r in read(file)]
    assert found == [
        ("run_start", "sft", None, None),
        ("run_end", None, "failed", "x"),
        ("run_start", "pt", None, None),
        ("run_end", None, "interrupted", None),
        ("run_start", "sft", None, None),
        ("run_end", None, None, None),
    ]


def test_output_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = make_config({"model": "m", "datasets": [{"path": "d"}], "output_dir": str(tmp_path / "file" / "out")})
    with pytest.raises(UserError, match="cannot be written"), start(config, "sft"):
        pass
