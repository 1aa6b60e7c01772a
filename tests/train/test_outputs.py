"""What a run leaves behind is what it trained: others load it and find the loss that the engine found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from surogate.cli import main
from surogate.config import make_config
from surogate.errors import UserError
from surogate.train.result import clear_unfinished, publish
from surogate.train.setup import prepare_data
from tests.train.support import config_for, same_files, train, weights_of, write_model, write_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 16)


def loss_of(loaded, config: dict, mode: str) -> float:
    """Token-weighted loss over the validation rows of a configuration, by PyTorch, each row by itself."""
    shard = prepare_data(make_config(config), mode)[0].validation
    assert shard is not None
    total, count = 0.0, 0
    for number in range(shard.rows):
        tokens, mask = shard.row(number)
        assert len(tokens) <= config["sequence_len"]
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            found = torch.log_softmax(loaded(input_ids=ids).logits[0, :-1].double(), -1)
        trained = torch.from_numpy(mask[1:].astype(bool))
        total -= float(found[torch.arange(len(tokens) - 1), ids[0, 1:]][trained].sum())
        count += int(trained.sum())
    return total / count


CASES = {
    "full": {},
    "bf16 with master copies": {"recipe": "bf16"},
    "bf16 rounded stochastically": {"recipe": "bf16", "master_weights": False},
    "lora": {"lora": True, "lora_rank": 4, "lora_dropout": 0.1, "lora_alpha": 12.0},
    "rslora on two layers": {"lora": True, "use_rslora": True, "lora_target_modules": ["v_proj", "1.mlp.up_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_sft_result_has_the_loss_of_the_run(tmp_path, rows, case: str) -> None:
    """The last evaluation of the run, made before anything was written, against transformers or PEFT."""
    changes = CASES[case]
    source = write_model(tmp_path / "model", num_hidden_layers=2, dtype="bfloat16" if "bf16" in case else "float32")
    config = config_for(
        tmp_path, source, rows, num_train_epochs=3, learning_rate=1e-2, validation_split_ratio=0.3, **changes
    )
    run = train(config)
    if "lora" in changes:
        peft = pytest.importorskip("peft")
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(run.result, dtype=torch.float32)
    else:
        kept = transformers.AutoModelForCausalLM.from_pretrained(run.result, dtype="auto").dtype
        assert kept == (torch.bfloat16 if "bf16" in case else torch.float32)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(run.result, dtype=torch.float32)
    found = run.history[-1]["eval_loss"]
    assert found < 0.9 * run.history[0]["loss"]  # it has learnt something, so equality means something
    assert loss_of(loaded.eval(), config, "sft") == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("scratch", [False, True])
def test_pre_trained_model_has_the_loss_of_the_run(tmp_path, model, scratch: bool) -> None:
    text, other = tmp_path / "text.jsonl", tmp_path / "other.jsonl"
    text.write_text(json.dumps({"text": "the sun is red and the sea is blue. " * 40}) + "\n")
    other.write_text(json.dumps({"text": "the sea is blue and the sun is red. "}) + "\n")
    config = config_for(
        tmp_path, model, text, datasets=[{"path": str(text)}], validation_datasets=[{"path": str(other)}],
        from_scratch=scratch, max_steps=20, learning_rate=1e-2, sequence_len=64, save_dtype="float32",
    )  # fmt: skip
    config.pop("chat_template")
    run = train(config, "pt")
    losses = [r["loss"] for r in run.history]
    assert losses[-1] < 0.8 * losses[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run.result)
    assert loss_of(loaded, config, "pt") == pytest.approx(run.history[-1]["eval_loss"], rel=1e-5)


def test_merge_by_the_command_is_pefts_merge(tmp_path, model, rows, capsys) -> None:
    peft = pytest.importorskip("peft")
    run = train(config_for(tmp_path, model, rows, lora=True, lora_rank=4, max_steps=4, learning_rate=1e-2))
    assert main(["merge", str(run.result), str(tmp_path / "merged")]) == 0
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(run.result)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        theirs = adapted.merge_and_unload()
        assert (ours(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max() < 1e-5
    for name, tensor in theirs.state_dict().items():
        assert (ours.state_dict()[name] - tensor).abs().max() < 1e-6, name


def test_a_new_result_leaves_nothing_of_the_old_one(tmp_path, model, rows) -> None:
    """An adapter's files beside a model's would make transformers load the adapter's base instead of the model."""
    config = config_for(tmp_path, model, rows, max_steps=2)
    train({**config, "lora": True})
    assert (tmp_path / "out" / "adapter_config.json").exists()
    run = train(config)
    left = {p.name for p in run.result.iterdir()}
    assert not left & {"adapter_config.json", "adapter_model.safetensors"} and "model.safetensors" in left
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run.result)
    assert np.array_equal(loaded.state_dict()["model.norm.weight"], weights_of(run.result)["model.norm.weight"])
    train({**config, "lora": True})
    left = {p.name for p in run.result.iterdir()}
    assert not left & {"model.safetensors", "config.json"} and "adapter_config.json" in left


def test_publishing_again_replaces_shards_and_folders(tmp_path) -> None:
    """Shards of an earlier result go, as does a single file where shards come; other files of the folder stay."""

    def writer(*names: str):
        def write(folder: Path) -> None:
            for name in names:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("new")

        return write

    (tmp_path / "notes.txt").write_text("mine")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    for names in (("model.safetensors",), shards, ("model.safetensors", "additional_chat_templates/tool.jinja")):
        for _ in range(2):
            publish(tmp_path, writer("config.json", *names))
        found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
        assert {n for n in found if not n.startswith("additional")} == {"config.json", "notes.txt", *names[:3]} - {
            "additional_chat_templates/tool.jinja"
        }
    assert (tmp_path / "additional_chat_templates" / "tool.jinja").exists()

    def fails(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise UserError("the disk is full")

    with pytest.raises(UserError):
        publish(tmp_path, fails)
    assert (tmp_path / "config.json").read_text() == "new" and not list(tmp_path.glob(".result*"))


def test_half_written_results_of_killed_runs_go(tmp_path) -> None:
    """Those of a process that is gone; one that another run is writing stays."""
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True).stdout.strip()
    for pid in (gone, str(os.getppid())):
        (tmp_path / f".result.tmp-{pid}").mkdir()
        (tmp_path / f".result.tmp-{pid}" / "config.json").write_text("half")
    clear_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f".result.tmp-{os.getppid()}"]


def test_a_model_that_no_run_made_is_not_overwritten(tmp_path, model, rows) -> None:
    config = config_for(tmp_path, model, rows, max_steps=1)
    own = write_model(tmp_path / "own", num_hidden_layers=1)
    before = {p.name: p.read_bytes() for p in own.iterdir()}
    for changes, words in [({"model": str(own)}, "folder of the model itself"), ({}, "holds a model already")]:
        with pytest.raises(UserError, match=words):
            train({**config, "output_dir": str(own), **changes})
        assert {p.name: p.read_bytes() for p in own.iterdir()} == before
    assert same_files(train(config).result, train(config).result)  # a run's own folder is another matter
