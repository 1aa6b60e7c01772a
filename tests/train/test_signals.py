"""Signals: the first stops after the step with a checkpoint from which the run goes on, the second at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from surogate.cli import main
from surogate.train.checkpoint import find_latest
from surogate.train.loop import Trainer
from tests.train.support import config_for, same_files, train, write_model, write_rows

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_saves_and_the_run_goes_on(tmp_path, model, monkeypatch, capsys, number, code) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    path, step = tmp_path / "c.yaml", Trainer._step
    path.write_text(yaml.safe_dump(config_for(tmp_path, model, rows, max_steps=4)))

    def signalled(self, at, feed, schedule) -> None:
        step(self, at, feed, schedule)
        if at == 2:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", signalled)
        assert main(["sft", str(path)]) == code
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    said = capsys.readouterr().err
    assert "stopping after this step" in said and "resume_from_checkpoint=true" in said
    out = tmp_path / "out"
    latest = find_latest(str(out), lambda line: None)
    assert latest is not None and latest.name == "checkpoint-2"
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert events[-1]["status"] == "interrupted" and max(e.get("step", 0) for e in events) == 2
    assert main(["sft", str(path), "resume_from_checkpoint=true"]) == 0
    whole = train(config_for(tmp_path / "whole", model, rows, max_steps=4))
    assert same_files(out, whole.result)


def test_the_second_interrupt_does_not_wait_for_python() -> None:
    """The handler thread ends the process while the main thread is inside a call that never comes back."""
    code = (
        "import ctypes, os, signal\n"
        "from surogate.train.signals import listening\n"
        "libc = ctypes.CDLL(None)\n"
        "with listening():\n"
        "    for _ in range(2): libc.kill(os.getpid(), signal.SIGINT)\n"
        "    while True: libc.pause()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "stopped at once" in done.stderr
