"""Checkpoints: bit-equal, complete or absent at whatever moment the process dies, and one message for a mistake."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.errors import UserError
from surogate.train.checkpoint import STATE_DIR, CheckpointWriter, check_output_dir, find_latest, load_state

MANIFEST = f"{STATE_DIR}/manifest.json"


def model_bytes(step: int) -> bytes:
    return bytes([step % 256]) * (1000 + step)


def arrays(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "adam_m.model.norm.weight": rng.standard_normal((5, 7), np.float32),
        "master": rng.standard_normal(3),
        "bf16": rng.integers(0, 1 << 16, (4,), np.uint16),
        "cursor": np.array(step, np.int64),
        "rng": bytes([step % 256, 0, 255]),
    }


def write_model(step: int) -> Any:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(model_bytes(step))
        (directory / "extra").mkdir()
        (directory / "extra" / "template.jinja").write_text("x")

    return write


def save(writer: CheckpointWriter, step: int) -> Path:
    return writer.save(step, write_model(step), {"step": step, "loss": 0.1 + step / 3}, arrays(step))


def assert_whole(path: Path, step: int) -> None:
    """Everything in a checkpoint is what was saved for its step, bit for bit."""
    assert (path / "model.safetensors").read_bytes() == model_bytes(step)
    state, found = load_state(path)
    assert state == {"step": step, "loss": 0.1 + step / 3}
    assert set(found) == set(arrays(step))
    for name, expected in arrays(step).items():
        array = np.frombuffer(expected, np.uint8) if isinstance(expected, bytes) else expected
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
        copy = np.empty_like(array)
        found.read_into(name, copy)
        assert copy.tobytes() == array.tobytes()


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_what_comes_back_is_what_was_saved(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "missing") is None
    writer = CheckpointWriter(tmp_path / "new" / "out")
    for step in (3, 20, 100):
        assert save(writer, step) == find_latest(tmp_path / "new" / "out")
        assert_whole(tmp_path / "new" / "out" / f"checkpoint-{step}", step)


def test_the_limit_keeps_the_newest(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, save_total_limit=2)
    for step in (1, 2, 9, 10):
        save(writer, step)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]
    # Started again from scratch: steps begin anew, and what is saved last is newest whatever its number.
    save(CheckpointWriter(tmp_path, save_total_limit=1), 4)
    assert names(tmp_path) == ["checkpoint-4"] and find_latest(tmp_path) == tmp_path / "checkpoint-4"


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(5, write_model(1), {}, {})
    save(writer, 5)
    assert names(tmp_path) == ["checkpoint-5"]
    assert_whole(tmp_path / "checkpoint-5", 5)


@pytest.mark.parametrize("damage", ["manifest", "missing", "short", "text", "format"])
def test_what_is_incomplete_is_passed_over_and_reported(damage: str, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, save_total_limit=1)
    good, bad = save(CheckpointWriter(tmp_path), 1), save(CheckpointWriter(tmp_path), 2)
    if damage == "manifest":
        (bad / MANIFEST).unlink()
    elif damage == "missing":
        (bad / "model.safetensors").unlink()
    elif damage == "short":
        os.truncate(bad / "model.safetensors", 10)
    elif damage == "text":
        (bad / MANIFEST).write_text('{"format": 1, "st')
    else:
        document = json.loads((bad / MANIFEST).read_text()) | {"format": 99}
        (bad / MANIFEST).write_text(json.dumps(document))
    reports: list[str] = []
    assert find_latest(tmp_path, reports.append) == good
    assert len(reports) == 1 and "checkpoint-2" in reports[0]
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_state(bad)
    save(writer, 3)  # the limit counts complete ones; what it does not know it does not touch
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = save(CheckpointWriter(tmp_path), 7)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[500] ^= 1
    (path / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(UserError, match="model.safetensors was changed or damaged"):
        load_state(path)
    load_state(path, verify=False)


def test_a_failed_save_leaves_nothing_and_the_old_one_stays(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, save_total_limit=1)
    save(writer, 1)

    def broken(directory: Path) -> None:
        (directory / "x").write_bytes(b"x")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        writer.save(2, broken, {}, {})
    assert names(tmp_path) == ["checkpoint-1"]
    assert_whole(tmp_path / "checkpoint-1", 1)


# -- in the background ------------------------------------------------------------------------------------------------


def test_a_save_in_the_background(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    may_go_on, thread = threading.Event(), []

    def write(directory: Path) -> None:
        thread.append(threading.current_thread())
        assert may_go_on.wait(60)
        write_model(1)(directory)

    writer.save_async(1, write, {"step": 1, "loss": 0.1 + 1 / 3}, arrays(1))
    assert find_latest(tmp_path) is None  # and the caller goes on
    may_go_on.set()
    writer.save_async(2, write_model(2), {"step": 2, "loss": 0.1 + 2 / 3}, arrays(2))  # waits for the first
    assert find_latest(tmp_path) in (tmp_path / "checkpoint-1", tmp_path / "checkpoint-2")
    writer.wait()
    assert thread[0] is not threading.main_thread()
    for step in (1, 2):
        assert_whole(tmp_path / f"checkpoint-{step}", step)


@pytest.mark.parametrize("call", ["wait", "save", "save_async"])
def test_an_error_in_the_background_comes_up_at_the_next_call_once(call: str, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)

    def broken(directory: Path) -> None:
        raise UserError("the disk is full")

    writer.save_async(1, broken, {}, {})
    with pytest.raises(UserError, match="the disk is full"):
        writer.wait() if call == "wait" else getattr(writer, call)(2, write_model(2), {}, {})
    save(writer, 3)
    assert names(tmp_path) == ["checkpoint-3"]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path)
    save(writer, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 2_000_000))
    with pytest.raises(UserError) as error:
        writer.save(2, write_model(2), {}, {}, write_bytes=3_000_000)
    assert "2,000,000 bytes free" in str(error.value) and "4,048,576 bytes" in str(error.value)
    with pytest.raises(UserError, match="2,000,000 bytes free"):
        check_output_dir(tmp_path, 2_000_001)
    check_output_dir(tmp_path, 2_000_000)
    assert names(tmp_path) == ["checkpoint-1"]


def test_an_output_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError, match="cannot be written"):
            check_output_dir(path, 0)
        with pytest.raises(UserError, match="cannot be written"):
            CheckpointWriter(path)
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(UserError, match="cannot be written"):
            check_output_dir(tmp_path / "locked", 0)


def test_the_limit_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        CheckpointWriter(tmp_path, save_total_limit=0)


# -- SIGKILL ----------------------------------------------------------------------------------------------------------

# Saves steps 1, 2, 3 and 2 again; every call that changes the file system is counted, and number `at` is never made.
KILLED_AT = """
import os, signal, sys
from pathlib import Path
import surogate.io.files, surogate.train.checkpoint as checkpoint
from tests.io import test_checkpoint as t

def count(at):
    made = 0
    def hook(event, args):
        nonlocal made
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        changes = changes or event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if changes or event == "fsync":
            made += 1
            if made == at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    os.fsync = lambda descriptor: hook("fsync", ())  # the page cache outlives a killed process: no need to wait
    return lambda: made

def run(directory, at):
    total = count(at)
    writer = checkpoint.CheckpointWriter(directory, save_total_limit=2)
    for step in (1, 2, 3, 2):
        t.save(writer, step)
    print(total(), flush=True)
    os._exit(0)

root = Path(sys.argv[1])
if os.fork() == 0:
    run(root / "whole", -1)
os.wait()
for at in range(1, 10**6):
    pid = os.fork()
    if pid == 0:
        run(root / str(at), at)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        break
"""


def survivors(directory: Path, limit: int) -> None:
    """After a kill: what is found is whole, and a new writer cleans up and goes on."""
    reports: list[str] = []
    before = find_latest(directory, reports.append)
    assert not reports  # nothing half-written ever bears a checkpoint's name
    if before is not None:
        assert_whole(before, json.loads((before / MANIFEST).read_text())["step"])
    writer = CheckpointWriter(directory, save_total_limit=limit)
    assert find_latest(directory) == before
    assert not [n for n in names(directory) if "tmp" in n]
    save(writer, 4)
    latest = find_latest(directory)
    assert latest == directory / "checkpoint-4"
    assert_whole(latest, 4)
    assert len(names(directory)) <= limit


def test_killed_before_every_single_change_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    run = subprocess.run([sys.executable, "-c", KILLED_AT, str(tmp_path)], capture_output=True, text=True, check=True)
    changes = int(run.stdout.split()[0])
    assert changes > 60
    seen = set()
    for at in range(1, changes + 1):
        directory = tmp_path / str(at)
        if directory.exists():
            latest = find_latest(directory)
            seen.add(latest.name if latest else None)
            survivors(directory, 2)
    assert seen >= {None, "checkpoint-1", "checkpoint-2", "checkpoint-3"}


SAVES_FOR_EVER = """
import sys
from pathlib import Path
from surogate.train.checkpoint import CheckpointWriter
from tests.io import test_checkpoint as t
writer = CheckpointWriter(Path(sys.argv[1]), save_total_limit=2)
step = 0
while True:
    step += 1
    t.save(writer, step)
    print(step, flush=True)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    acknowledged = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(int(rng.integers(1, 6))):
            acknowledged = int(child.stdout.readline())
        for _ in range(int(rng.integers(0, 20_000))):  # some moment within the next save
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        latest = find_latest(tmp_path)
        assert latest is not None
        step = json.loads((latest / MANIFEST).read_text())["step"]
        assert step >= acknowledged  # what was said to be saved is there
        assert_whole(latest, step)
    survivors(tmp_path, 2)
