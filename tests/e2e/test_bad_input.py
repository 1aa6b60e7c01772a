"""A user's mistakes through the real command: exit code 2, one message with place and fix, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from surogate.cli import main
from surogate.track.machine import Machine
from surogate.train.checkpoint import find_latest, load_state
from tests.train.support import config_for, write_model, write_rows

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture
def world(tmp_path, model):
    """Writes a configuration (changed as asked) and runs ``surogate sft`` on it."""
    rows = write_rows(tmp_path / "rows.jsonl", 8)

    def go(text: str | None = None, verb: str = "sft", **changes):
        path = tmp_path / "config.yaml"
        config = config_for(tmp_path, model, rows, max_steps=1) | changes
        path.write_text(text if text is not None else yaml.safe_dump(config, allow_unicode=True, sort_keys=False))
        return main([verb, str(path)])

    go.folder, go.model, go.rows = tmp_path, model, rows
    return go


def refused(code: int, capsys, *words: str) -> str:
    """The one message; checks its form: a head that names the place, what was expected, the fix; each once."""
    captured = capsys.readouterr()
    assert code == 2, captured
    head, *rest = captured.err.removesuffix("\n").split("\n")
    assert ":" in head and head not in captured.out and all(line.startswith("  ") for line in rest), captured.err
    assert captured.err.count("\n  expected: ") <= 1 and captured.err.count("\n  fix: ") <= 1, captured.err
    for word in words:
        assert word in captured.err, captured.err
    return captured.err


def early(code: int, capsys, *words: str) -> str:
    """As :func:`refused`, and nothing was shown before it: the mistake was found before anything began."""
    message = capsys.readouterr()
    assert message.out == ""
    print(message.err, end="", file=sys.stderr)
    return refused(code, capsys, *words)


def test_unknown_key_names_the_nearest(world, capsys) -> None:
    early(world(learning_rat=1e-3), capsys, "config.yaml:", "unknown key 'learning_rat'", "fix: write learning_rate:")


def test_foreign_key_names_ours(world, capsys) -> None:
    early(world(micro_batch_size=2), capsys, "per_device_train_batch_size")


def test_wrong_type(world, capsys) -> None:
    early(world(max_steps="many"), capsys, "max_steps", "many")


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_len": 0},
        {"lora_rank": -1, "lora": True},
        {"lora_rank": 0, "lora": True},
        {"learning_rate": -1.0},
        {"per_device_train_batch_size": 0},
        {"gradient_accumulation_steps": -2},
        {"num_train_epochs": 0},
        {"max_steps": 0},
        {"max_steps": -5},
        {"warmup_steps": -1},
        {"save_total_limit": -1},
        {"adam_epsilon": 0},
        {"cpu_threads": -1},
        {"lora_dropout": 1.0, "lora": True},
        {"validation_split_ratio": 1.0},
    ],
)
def test_values_out_of_range(world, capsys, change) -> None:
    key = next(iter(change))
    early(world(**change), capsys, "config.yaml:", f"{key} is {change[key]}", "expected: ")


def test_a_configuration_that_is_no_file(tmp_path, capsys) -> None:
    early(main(["sft", str(tmp_path / "none.yaml")]), capsys, "none.yaml: no such file")
    early(main(["sft", str(tmp_path)]), capsys, str(tmp_path), "cannot be read")


def test_missing_files(world, capsys, tmp_path) -> None:
    refused(world(datasets=[{"path": "no/such.jsonl"}]), capsys, "no/such.jsonl")
    refused(world(model=str(tmp_path / "no-model")), capsys, "no-model")
    early(world(resume_from_checkpoint=str(tmp_path / "checkpoint-9")), capsys, "config.yaml:", "checkpoint-9", "fix: ")


def test_pasted_quotes_and_colons(world, capsys) -> None:
    early(world("model: \u201cx\u201d\ndatasets:\n  - path: y\n"), capsys, "config.yaml:1:8", "\u201c")
    early(world("model\uff1a x\ndatasets:\n  - path: y\n"), capsys, "config.yaml:1:6", "\uff1a")
    (world.folder / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    early(main(["sft", str(world.folder / "latin.yaml")]), capsys, "latin.yaml:1", "UTF-8")


def test_empty_dataset(world, capsys) -> None:
    (world.folder / "empty.jsonl").write_text("")
    refused(world(datasets=[{"path": str(world.folder / "empty.jsonl")}]), capsys, "empty.jsonl")


def test_no_supervised_tokens(world, capsys) -> None:
    path = world.folder / "silent.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "user", "content": "anyone?"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    refused(world(datasets=[{"path": str(path)}]), capsys, "silent.jsonl")


def test_token_beyond_the_embedding(world, capsys, tmp_path) -> None:
    small = write_model(tmp_path / "small", vocab_size=30, num_hidden_layers=1)
    capsys.readouterr()  # transformers' own progress
    refused(world(model=str(small)), capsys, "beyond the model's embedding", "rows.jsonl:")


def damaged(world, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in world.model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_truncated_safetensors(world, capsys, tmp_path) -> None:
    copy = damaged(world, tmp_path)
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(world(model=str(copy)), capsys, "model.safetensors", "expected")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ("1 weights are missing", "model.norm.weight")),
        (lambda t: t.update({"extra.weight": t["model.norm.weight"]}), ("belong to no part", "extra.weight")),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:3]}), ("has shape [3]", "expected: [")),
    ],
)
def test_weights_that_are_not_the_models(world, capsys, tmp_path, change, words) -> None:
    from safetensors.torch import load_file, save_file

    copy = damaged(world, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file({n: t.clone() for n, t in tensors.items()}, copy / "model.safetensors", {"format": "pt"})
    refused(world(model=str(copy)), capsys, str(copy), *words)
    (copy / "model.safetensors").unlink()
    refused(world(model=str(copy)), capsys, str(copy), "has no weights", "model.safetensors")


def test_unknown_architecture(world, capsys, tmp_path) -> None:
    copy = damaged(world, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "model_type": "rwkv", "architectures": ["RwkvForCausalLM"]})
    )
    refused(world(model=str(copy)), capsys, "RwkvForCausalLM", "LlamaForCausalLM", "docs/adding-a-model.md")


def test_what_a_model_needs_and_we_lack_is_refused(world, capsys, tmp_path) -> None:
    copy = damaged(world, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    for change in ({"hidden_act": "relu"}, {"attention_dropout": 0.1}, {"num_key_value_heads": 4}):
        (copy / "config.json").write_text(json.dumps({**config, **change}))
        refused(world(model=str(copy)), capsys, next(iter(change)))


def test_lora_target_that_matches_nothing(world, capsys) -> None:
    refused(world(lora=True, lora_target_modules=["q_proj", "query"]), capsys, "'query'", "down_proj, gate_proj")


def test_output_dir_that_cannot_be_written(world, capsys) -> None:
    (world.folder / "file").write_text("in the way")
    for path in (world.folder / "file", world.folder / "file" / "out"):
        early(world(output_dir=str(path)), capsys, "config.yaml:", str(path), "fix: choose another output_dir")
    assert (world.folder / "file").read_text() == "in the way"


def test_too_little_room_is_found_before_the_first_step(world, capsys, monkeypatch) -> None:
    """Both numbers are named."""
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    refused(world(), capsys, "1,000 bytes free", "expected")
    assert not list((world.folder / "out").glob("*.safetensors"))


def command(world, prefix: list[str], **changes) -> subprocess.CompletedProcess[str]:
    """``surogate sft`` in a process of its own, behind ``prefix``."""
    config = config_for(world.folder, world.model, world.rows) | changes
    path = world.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    words = [*prefix, sys.executable, "-m", "surogate", "sft", str(path)]
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_files_that_may_not_grow(world) -> None:
    """A limit on the size of files (ulimit -f, here 64 KiB) that the weights exceed: one message, nothing half-written
    under a final name."""
    result = command(world, ["sh", "-c", 'ulimit -f 128; exec "$@"', "-"], save_steps=1, max_steps=2)
    assert result.returncode == 2 and result.stderr.count("\n") <= 3 and "ulimit -f" in result.stderr, result.stderr
    out = world.folder / "out"
    assert {p.name for p in out.iterdir()} == {"events.jsonl"}


def test_a_disk_that_fills_up(world) -> None:
    """A real file system of 2 MB, with room for two checkpoints: the third is one message, the others are whole."""
    out = world.folder / "out"
    out.mkdir()
    keep = world.folder / "kept"
    script = f'mount -t tmpfs -o size=2m none {out} || exit 77; "$@"; code=$?; cp -r {out} {keep}; exit $code'
    result = command(
        world, ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "-"], save_steps=1, max_steps=9
    )
    if result.returncode in (1, 77, 126, 127) and not keep.exists():
        pytest.skip(f"no file system may be mounted here: {result.stderr.strip()}")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") <= 3 and ("disk is full" in result.stderr or "disk space" in result.stderr)
    saved = sorted(p.name for p in keep.glob("checkpoint-*"))
    assert saved and find_latest(keep) == keep / saved[-1] and not list(keep.glob("*.tmp-*"))
    load_state(keep / saved[-1])
    assert not (keep / "model.safetensors").exists()


def test_a_plan_beyond_the_machine(world, capsys, monkeypatch) -> None:
    """Before anything is allocated, and by purpose. What only other processes' use prevents is a warning."""
    here = Machine.here()
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: replace(here, memory=1 << 20)))
    refused(world(), capsys, "the run needs ", "MiB of memory (", "the 1.0 MiB of this machine", "recompute: block")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: replace(here, available=1 << 20)))
    assert world() == 0
    assert "and 1.0 MiB are available now" in (world.folder / "out" / "events.jsonl").read_text()


def test_a_learning_rate_that_breaks_the_model(world, capsys) -> None:
    """Exit code 1, the step, and what to do; what an earlier run saved stays as it was."""
    assert world(save_steps=1, max_steps=2) == 0
    out = world.folder / "out"
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "events.jsonl"}
    capsys.readouterr()
    assert world(learning_rate=1e6, max_steps=20) == 1
    message = capsys.readouterr().err
    assert message.startswith("surogate: ") and message.count("\n") == 1
    assert " at step " in message and "Lower learning_rate" in message
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "events.jsonl"} == before


@pytest.mark.parametrize("verb", ["plan", "tokenize", "pt"])
def test_other_verbs_answer_alike(world, capsys, verb: str) -> None:
    early(world(verb=verb, learning_rat=1e-3), capsys, "learning_rat")


def test_cuda_is_refused_where_there_is_none(world, capsys) -> None:
    refused(world(device="cuda"), capsys, "device")
