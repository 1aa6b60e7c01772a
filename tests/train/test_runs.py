"""Runs of tiny models through ``surogate.train.run``: invariance, outputs, recipes, pre-training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from surogate.errors import TrainingFailed, UserError
from surogate.export.merge import merge_adapter
from tests.train.support import config_for, same_files, train, weights_of, write_model, write_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 24)


def losses(run) -> list[float]:
    return [r["loss"] for r in run.history]


@pytest.mark.parametrize("lora", [False, True])
def test_splits_of_the_global_batch_agree(tmp_path, model, rows, lora) -> None:
    """8 x 1, 2 x 4 and 1 x 8: one loss and one gradient norm a step."""
    found = []
    for batch, accumulation in [(8, 1), (2, 4), (1, 8)]:
        config = config_for(
            tmp_path / f"{batch}", model, rows, per_device_train_batch_size=batch, max_steps=4, lora=lora,
            gradient_accumulation_steps=accumulation, sample_packing=False,
        )  # fmt: skip
        found.append(train(config).history)
    for history in found[1:]:
        for a, b in zip(found[0], history, strict=True):
            assert a["targets"] == b["targets"]
            assert b["loss"] == pytest.approx(a["loss"], rel=2e-6)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-5)


@pytest.mark.parametrize("changes", [{"recompute": "selective"}, {"recompute": "block"}, {"cpu_threads": 2}])
@pytest.mark.parametrize("lora", [False, True])
def test_recompute_and_threads_change_no_bit(tmp_path, model, rows, lora, changes) -> None:
    base = {"lora": lora, "max_steps": 3}
    if lora:
        base["lora_dropout"] = 0.2
    a = train(config_for(tmp_path / "a", model, rows, **base))
    b = train(config_for(tmp_path / "b", model, rows, **base, **changes))
    assert losses(a) == losses(b)
    assert same_files(a.result, b.result)


def test_packing_changes_no_row(tmp_path, model, rows) -> None:
    """With learning rate 0 an epoch's summed loss is that of its rows, packed or not."""
    sums = []
    for packing in (True, False):
        run = train(config_for(tmp_path / str(packing), model, rows, learning_rate=0.0, sample_packing=packing))
        sums.append((sum(r["loss"] * r["targets"] for r in run.history), sum(r["targets"] for r in run.history)))
    assert sums[0][1] == sums[1][1]
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_evaluation_does_not_depend_on_its_batch(tmp_path, model, rows, size) -> None:
    config = config_for(
        tmp_path, model, rows, learning_rate=0.0, max_steps=1, validation_split_ratio=0.4,
        per_device_eval_batch_size=size,
    )  # fmt: skip
    loss = train(config).history[-1]["eval_loss"]
    reference = train({**config, "output_dir": str(tmp_path / "b"), "per_device_eval_batch_size": 3})
    assert loss == pytest.approx(reference.history[-1]["eval_loss"], rel=1e-6)


def engine_loss(tmp_path: Path, model: Path, rows: Path) -> float:
    config = config_for(
        tmp_path, model, rows, learning_rate=0.0, max_steps=1,
        validation_datasets=[{"path": str(rows), "type": "instruction"}],
    )  # fmt: skip
    return float(train(config).history[-1]["eval_loss"])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_full_model_loads_in_transformers(tmp_path, rows, model_type) -> None:
    source = write_model(tmp_path / "model", model_type)
    run = train(config_for(tmp_path, source, rows, max_steps=3, learning_rate=1e-2))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(run.result, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert weights_of(run.result)["model.norm.weight"].tolist() != weights_of(source)["model.norm.weight"].tolist()
    assert transformers.AutoTokenizer.from_pretrained(run.result).chat_template  # the one it was trained with
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        expected = float(loaded(input_ids=ids, labels=ids).loss)
    assert np.isfinite(expected)
    # The engine, given the files it wrote, agrees with transformers on the same tokens.
    text = tmp_path / "ids.jsonl"
    text.write_text(json.dumps({"input_ids": ids[0].tolist(), "labels": ids[0].tolist()}) + "\n")
    config = config_for(
        tmp_path / "check", run.result, rows, learning_rate=0.0, max_steps=1, datasets=[{"path": str(text)}]
    )
    config.pop("chat_template")
    assert train(config).history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_adapter_loads_in_peft_and_merges(tmp_path, model, rows) -> None:
    peft = pytest.importorskip("peft")
    run = train(config_for(tmp_path, model, rows, lora=True, max_steps=6, learning_rate=1e-2, use_rslora=True))
    config = json.loads((run.result / "adapter_config.json").read_text())
    assert config["r"] == 16 and config["use_rslora"] and "o_proj" in config["target_modules"]
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(run.result)
    ids = torch.arange(1, 60)[None]
    with torch.no_grad():
        with_adapter = adapted(input_ids=ids).logits
        merged_by_peft = adapted.merge_and_unload().state_dict()
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert (with_adapter - plain(input_ids=ids).logits).abs().max() > 1e-3
    merge_adapter(None, run.result, tmp_path / "merged")
    ours = weights_of(tmp_path / "merged")
    for name, tensor in ours.items():
        assert np.abs(tensor - merged_by_peft[name].numpy()).max() < 1e-6, name
    assert engine_loss(tmp_path / "c", tmp_path / "merged", rows) < engine_loss(tmp_path / "d", model, rows)


def test_bf16_weights_move_by_small_steps(tmp_path, rows) -> None:
    """lr 1e-5 for 200 steps: with an f32 master copy, and with stochastic rounding, weights go where f32 goes.
    Rounding to nearest would leave almost all of them where they were."""
    model = write_model(tmp_path / "model", dtype="bfloat16", num_hidden_layers=1)
    start = weights_of(model)["model.layers.0.mlp.up_proj.weight"]
    moved = {}
    for name, changes in {
        "fp32": {"recipe": "fp32"},
        "master": {"recipe": "bf16"},
        "stochastic": {"recipe": "bf16", "master_weights": False},
    }.items():
        config = config_for(
            tmp_path / name, model, rows, max_steps=200, learning_rate=1e-5, lr_scheduler_type="constant",
            save_dtype="float32", **changes,
        )  # fmt: skip
        moved[name] = weights_of(train(config).result)["model.layers.0.mlp.up_proj.weight"] - start
    reference = moved["fp32"]
    assert np.abs(reference).mean() > 3e-4
    for name in ("master", "stochastic"):
        direction = (moved[name] * reference).sum() / np.sqrt((moved[name] ** 2).sum() * (reference**2).sum())
        size = (moved[name] * reference).sum() / (reference**2).sum()
        assert direction > (0.98 if name == "master" else 0.6), (name, direction)
        assert 0.8 < size < 1.2, (name, size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_save_dtype(tmp_path, model, rows, dtype) -> None:
    run = train(config_for(tmp_path, model, rows, max_steps=1, save_dtype=dtype))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run.result, dtype="auto")
    assert str(loaded.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("scratch", [False, True])
def test_pre_training(tmp_path, scratch) -> None:
    model = write_model(tmp_path / "model", initializer_range=0.02)
    text = tmp_path / "text.txt"
    text.write_text("the sun is red and the sea is blue. " * 60)
    config = config_for(
        tmp_path, model, text, datasets=[{"path": str(text)}], from_scratch=scratch, max_steps=40, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=4, weight_decay=0.01,
    )  # fmt: skip
    config.pop("chat_template")
    run = train(config, "pt")
    first, last = run.history[0]["loss"], run.history[-1]["loss"]
    assert last < 0.5 * first
    if scratch:
        assert first == pytest.approx(np.log(420), rel=0.2)  # nothing is known at first
    transformers.AutoModelForCausalLM.from_pretrained(run.result)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, model, rows) -> None:
    config = config_for(tmp_path, model, rows, max_steps=30, learning_rate=1e30, save_steps=1, max_grad_norm=0.0)
    with pytest.raises(TrainingFailed, match="not finite"):
        train(config)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "run_end" and events[-1]["status"] == "failed"
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_weights_that_do_not_fit_are_refused(tmp_path, model, rows) -> None:
    from safetensors.torch import load_file, save_file

    for name, change, words in [
        ("missing", lambda t: t.pop("model.norm.weight"), "missing.*model.norm.weight"),
        ("spare", lambda t: t.update(extra=torch.zeros(2)), "belong to no part.*extra"),
        ("shape", lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \[3\]"),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=words):
            train(config_for(tmp_path, folder, rows, max_steps=1))
