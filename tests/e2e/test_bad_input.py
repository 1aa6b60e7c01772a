"""A user's mistakes through the real command: exit code 2, one message with place and fix, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from surogate.cli import main
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
    """The one message; checks its form."""
    captured = capsys.readouterr()
    assert code == 2, captured
    message = captured.err
    assert "Traceback" not in message and message.strip()
    for word in words:
        assert word in message, message
    return message


def test_unknown_key_names_the_nearest(world, capsys) -> None:
    message = refused(world(learning_rat=1e-3), capsys, "config.yaml:", "learning_rat", "learning_rate")
    assert message.count("learning_rat'") <= 1


def test_foreign_key_names_ours(world, capsys) -> None:
    refused(world(micro_batch_size=2), capsys, "per_device_train_batch_size")


def test_wrong_type(world, capsys) -> None:
    refused(world(max_steps="many"), capsys, "max_steps", "many")


@pytest.mark.parametrize("change", [{"sequence_len": 0}, {"lora_rank": -1, "lora": True}, {"learning_rate": -1.0}])
def test_values_out_of_range(world, capsys, change) -> None:
    refused(world(**change), capsys, next(iter(change)))


def test_missing_files(world, capsys, tmp_path) -> None:
    assert main(["sft", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    refused(world(datasets=[{"path": "no/such.jsonl"}]), capsys, "no/such.jsonl")
    refused(world(model=str(tmp_path / "no-model")), capsys, "no-model")
    refused(world(resume_from_checkpoint=str(tmp_path / "checkpoint-9")), capsys, "checkpoint-9")
    assert main(["sft", str(tmp_path)]) == 2
    capsys.readouterr()


def test_pasted_quotes_and_colons(world, capsys) -> None:
    refused(world("model: \u201cx\u201d\ndatasets:\n  - path: y\n"), capsys, "config.yaml:1:8", "\u201c")
    refused(world("model\uff1a x\ndatasets:\n  - path: y\n"), capsys, "config.yaml:1:6", "\uff1a")
    (world.folder / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    assert main(["sft", str(world.folder / "latin.yaml")]) == 2
    assert "UTF-8" in capsys.readouterr().err


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
    refused(world(output_dir=str(world.folder / "file" / "out")), capsys, "file")


def test_full_disk(world, capsys, monkeypatch) -> None:
    """The room is checked before step 1, and both numbers are named."""
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    refused(world(), capsys, "1,000 bytes free", "expected")
    assert not list((world.folder / "out").glob("*.safetensors"))


@pytest.mark.parametrize("verb", ["plan", "tokenize", "pt"])
def test_other_verbs_answer_alike(world, capsys, verb: str) -> None:
    refused(world(verb=verb, learning_rat=1e-3), capsys, "learning_rat")


def test_cuda_is_refused_where_there_is_none(world, capsys) -> None:
    refused(world(device="cuda"), capsys, "device")
