"""A run that was interrupted goes on bit for bit: in this process at chosen steps, and killed at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from surogate.cli import main
from surogate.config import make_config
from surogate.errors import UserError
from surogate.train import loop
from tests.train.support import config_for, same_files, train, write_model, write_rows

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 30)


class Stopped(Exception):
    pass


def stop_after(step: int, monkeypatch) -> None:
    """Let the next run die right after the step, with nothing tidied up."""
    original = loop.Trainer._step

    def step_then_die(self, at, *rest):
        original(self, at, *rest)
        if at == step + 1:
            raise Stopped

    monkeypatch.setattr(loop.Trainer, "_step", step_then_die)


def state_of(run, step: int) -> bytes:
    """The bytes of the optimizer state in the last checkpoint."""
    folder = run.output_dir / f"checkpoint-{step}" / "surogate_state"
    return b"".join(p.read_bytes() for p in sorted(folder.glob("*.safetensors")))


MODES = {
    "full": {},
    "lora": {"lora": True, "lora_dropout": 0.1},
    "bf16": {"recipe": "bf16", "master_weights": False, "moments_dtype": "bfloat16"},
    "8bit": {"optim": "adamw_8bit"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", ["middle", "edge"])
def test_resumed_is_uninterrupted(tmp_path, monkeypatch, model, rows, mode: str, at: str) -> None:
    """Three epochs with packing; stopped in the middle of one and at the edge between two."""
    base = {"num_train_epochs": 3, "save_steps": 1, "weight_decay": 0.1, "warmup_steps": 2, **MODES[mode]}
    whole = train(config_for(tmp_path / "whole", model, rows, **base))
    total = len(whole.history)
    per_epoch = total // 3
    step = per_epoch if at == "edge" else per_epoch + 2
    config = config_for(tmp_path / "parts", model, rows, **base)
    with monkeypatch.context() as patch:
        stop_after(step, patch)
        with pytest.raises(Stopped):
            train(config)
    resumed = train({**config, "resume_from_checkpoint": True})
    assert [r["step"] for r in resumed.history] == list(range(step + 1, total + 1))
    assert [r["loss"] for r in resumed.history] == [r["loss"] for r in whole.history[step:]]
    assert [r["lr"] for r in resumed.history] == [r["lr"] for r in whole.history[step:]]
    assert same_files(whole.result, resumed.result)
    assert state_of(whole, total) == state_of(resumed, total)


def test_another_split_of_the_same_batch_resumes_in_the_same_order(tmp_path, monkeypatch, model, rows) -> None:
    base = {"num_train_epochs": 2, "save_steps": 1}
    four = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    whole = train(config_for(tmp_path / "whole", model, rows, **base, **four))
    config = config_for(tmp_path / "parts", model, rows, **base)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Stopped):
            train({**config, **four})
    resumed = train({**config, **one, "resume_from_checkpoint": True})
    for a, b in zip(whole.history[1:], resumed.history, strict=True):
        assert a["targets"] == b["targets"] and b["loss"] == pytest.approx(a["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 7}, "seed 42, this run has 7"),
        ({"sequence_len": 128}, "sequence_len 96"),
        ({"gradient_accumulation_steps": 3}, "effective_batch_size 2"),
        ({"sample_packing": False}, "sample_packing True"),
        ({"lora": True}, "lora_scale None"),
        ({"train_on": "all"}, "written with data"),
        ({"recipe": "bf16"}, r"float32\[.*\] in the checkpoint"),
        ({"max_steps": 1}, "is of step 2, and this run ends with step 1"),
    ],
)
def test_another_run_is_not_resumed(tmp_path, model, rows, change, words: str) -> None:
    config = config_for(tmp_path, model, rows, max_steps=2, save_steps=1)
    train(config)
    with pytest.raises(UserError, match=words):
        train({**config, **change, "resume_from_checkpoint": True})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_alpha": 8.0}, "lora_scale"),
        ({"use_rslora": True}, "lora_scale"),
        ({"lora_rank": 2, "lora_alpha": 1.0}, r"expected: float32\[2,"),
        ({"lora_target_modules": ["q_proj"]}, "nothing that this run trains"),
        ({"lora_target_modules": "all-linear"}, "is missing in the checkpoint"),
    ],
)
def test_other_adapters_are_not_resumed(tmp_path, model, rows, change, words: str) -> None:
    """Shapes alone would not tell: another scale makes other weights of the same A and B."""
    base = {"lora": True, "lora_rank": 4, "lora_alpha": 2.0, "lora_target_modules": ["q_proj", "up_proj"]}
    config = config_for(tmp_path, model, rows, max_steps=1, save_steps=1, **base)
    train(config)
    with pytest.raises(UserError, match=words):
        train({**config, **change, "resume_from_checkpoint": True})


def test_what_changes_the_course_is_told(tmp_path, model, rows) -> None:
    """Going on with another learning rate is allowed, and nobody takes it for the run that was interrupted."""
    config = config_for(tmp_path, model, rows, max_steps=2, save_steps=1)
    train(config)
    harmless = {"cpu_threads": 1, "logging_steps": 2, "recompute": "block", "save_total_limit": 5}
    train({**config, **harmless, "resume_from_checkpoint": True})
    assert not told(tmp_path)
    train({**config, "learning_rate": 5e-4, "max_steps": 3, "resume_from_checkpoint": True})
    (message,) = told(tmp_path)
    assert "learning_rate was 0.001 and is 0.0005" in message and "max_steps was 2 and is 3" in message
    assert "from step 3 on" in message


def told(folder: Path) -> list[str]:
    """Warnings of a run."""
    events = map(json.loads, (folder / "out" / "events.jsonl").read_text().splitlines())
    return [e["message"] for e in events if e["event"] == "warning"]


def test_resume_without_a_checkpoint_starts_anew_and_says_so(tmp_path, model, rows) -> None:
    config = config_for(tmp_path, model, rows, max_steps=1, resume_from_checkpoint=True)
    assert len(train(config).history) == 1
    assert "no complete checkpoint" in (tmp_path / "out" / "events.jsonl").read_text()
    missing = make_config({**config, "resume_from_checkpoint": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="nowhere does not exist"):
        loop.run(missing)


def test_the_same_rows_made_anew_are_the_same_data(tmp_path, model, rows) -> None:
    """Another file, another cache, tokens made by another version (which has other keys): the run goes on."""
    base = {"max_steps": 4, "save_steps": 1}
    whole = train(config_for(tmp_path / "whole", model, rows, **base))
    config = config_for(tmp_path / "parts", model, rows, **base)
    train(config | {"max_steps": 2})
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text("\n" + rows.read_text().replace('", "', '" , "'))
    moved = {"datasets": [{"path": str(renamed), "type": "instruction"}], "cache_dir": str(tmp_path / "elsewhere")}
    resumed = train(config | moved | {"resume_from_checkpoint": str(tmp_path / "parts" / "out" / "checkpoint-1")})
    assert len(resumed.history) == 3
    assert resumed.history[0]["targets"] == whole.history[1]["targets"]
    renamed.write_text(rows.read_text().replace("red", "rot", 1))
    with pytest.raises(UserError, match="written with data"):
        train(config | moved | {"resume_from_checkpoint": True})


def test_a_folder_of_checkpoints_is_answered_by_the_newest(tmp_path, model, rows, capsys) -> None:
    config = config_for(tmp_path, model, rows, max_steps=2, save_steps=1)
    train(config)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert main(["sft", str(path), f"resume_from_checkpoint={tmp_path / 'out'}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and f"fix: write {tmp_path / 'out' / 'checkpoint-2'}" in shown.err
    assert main(["sft", str(path), "seed=7", "resume_from_checkpoint=true"]) == 2
    assert capsys.readouterr().err.count("expected:") == 1


def test_killed_twenty_times(tmp_path, model, rows) -> None:
    """SIGKILL at random moments, saves included (one after every step), and started again until it is done."""
    base = {"num_train_epochs": 8, "save_steps": 1, "save_total_limit": 3, "lora": True, "lora_dropout": 0.1}
    whole = train(config_for(tmp_path / "whole", model, rows, **base))
    config = {**config_for(tmp_path / "killed", model, rows, **base), "resume_from_checkpoint": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    events = tmp_path / "killed" / "out" / "events.jsonl"
    rng = random.Random(0)
    kills = 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(80):
        size = events.stat().st_size if events.exists() else 0
        process = subprocess.Popen(
            [sys.executable, "-m", "surogate", "sft", str(path)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
        )  # fmt: skip
        wanted = rng.randrange(1, 3)  # steps or checkpoints that it may report first
        if kills < 20:
            while process.poll() is None:
                text = events.read_bytes()[size:].decode() if events.exists() else ""
                if text.count('"event": "step"') + text.count('"event": "checkpoint"') >= wanted:
                    time.sleep(rng.random() * 0.004)  # anywhere within the next step or save
                    process.send_signal(signal.SIGKILL)
                    kills += process.wait() == -signal.SIGKILL
                time.sleep(0.001)
        _, errors = process.communicate()
        if process.returncode == 0:
            if kills >= 20 or _finished(events):
                break
        elif process.returncode != -signal.SIGKILL:
            pytest.fail(errors.decode())
    assert kills >= 20
    assert same_files(whole.result, tmp_path / "killed" / "out")


def _finished(events: Path) -> bool:
    return any(json.loads(line).get("status") == "done" for line in events.read_text().splitlines() if line)
