"""Tokenising that is killed leaves nothing that a later run could take for whole, and no process behind."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil

from surogate.data.shards import read_meta
from tests.data.samples import STYLES, chat, write_rows

# Prints a line for every chunk that is written, the processes that work, and at the end where the tokens are.
SCRIPT = """
import os, sys
from pathlib import Path
from surogate.data import DataOptions, DatasetSpec, Tokenizer, json_rows, prepare, workers

if __name__ == "__main__":
    json_rows.CHUNK_BYTES, workers._ALONE = 4000, 1
    options = DataOptions([DatasetSpec(sys.argv[1])], Path(sys.argv[2]), sequence_len=64, num_workers=2)
    done = prepare(options, Tokenizer(sys.argv[3]), print, lambda name, share: print("chunk", flush=True))
    print("done", done.train.directory)
"""


def start(folder: Path, cache: Path) -> subprocess.Popen[str]:
    arguments = [str(folder / "rows.jsonl"), str(cache), str(folder / "tokenizer")]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finish(folder: Path, cache: Path) -> tuple[Path, int]:
    """Run to the end; return the shard's folder and the number of chunks."""
    output, _ = start(folder, cache).communicate()
    lines = output.splitlines()
    assert lines[-1].startswith("done ")
    return Path(lines[-1].removeprefix("done ")), lines.count("chunk")


def contents(shard: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(shard.iterdir())}


def test_killed_at_random_moments(tmp_path: Path) -> None:
    STYLES["chatml"].write(tmp_path / "tokenizer")
    rows = [chat(f"user: ask {i}", f"assistant: {'word ' * (i % 13)}end {i}") for i in range(400)]
    write_rows(tmp_path / "rows.jsonl", rows)
    whole, chunks = finish(tmp_path, tmp_path / "clean")
    assert chunks >= 10
    tokens = tmp_path / "cache" / "tokens"
    rng = random.Random(0)
    moments = [1, chunks, *rng.sample(range(2, chunks), 3)]
    for moment in moments:
        process = start(tmp_path, tmp_path / "cache")
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line == "chunk\n"
            if seen == moment:
                break
        own = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        gone, alive = psutil.wait_procs(own, timeout=20)
        assert not alive
        for shard in tokens.iterdir():
            if shard.is_dir() and ".tmp-" not in shard.name:
                assert read_meta(shard) is not None
        if tokens.joinpath(whole.name).exists():  # killed behind the end: nothing is left to interrupt
            break
    again, _ = finish(tmp_path, tmp_path / "cache")
    assert contents(again) == contents(whole)
    assert [path.name for path in tokens.iterdir() if path.is_dir()] == [whole.name]


def test_the_folder_appears_last(tmp_path: Path) -> None:
    """Whatever is there of a shard's files, only all of them at their full length are a shard."""
    STYLES["chatml"].write(tmp_path / "tokenizer")
    write_rows(tmp_path / "rows.jsonl", [chat("user: a", f"assistant: {i}") for i in range(60)])
    whole, _ = finish(tmp_path, tmp_path / "clean")
    files = contents(whole)
    rng = np.random.default_rng(0)
    for _ in range(60):
        part = tmp_path / "part"
        part.mkdir(exist_ok=True)
        for path in part.iterdir():
            path.unlink()
        there = rng.random(len(files)) < 0.8
        cut = rng.integers(0, 2, len(files)) * rng.integers(0, 40, len(files))
        for (name, data), is_there, missing in zip(files.items(), there, cut, strict=True):
            if is_there:
                (part / name).write_bytes(data[: len(data) - missing])
        complete = bool(there.all()) and all(missing == 0 for missing in cut)
        assert (read_meta(part) is not None) == complete
