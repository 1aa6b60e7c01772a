"""``surogate sft`` on the GPU, from configuration to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.support import config_for, same_files, train, write_model, write_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3", dtype="bfloat16", head_dim=16, intermediate_size=96)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 24)


@pytest.mark.parametrize("lora", [False, True])
def test_losses_are_those_of_the_cpu(tmp_path, model, rows, lora) -> None:
    base = {"lora": lora, "max_steps": 8, "validation_split_ratio": 0.2}
    ours = train(config_for(tmp_path / "gpu", model, rows, device="cuda", **base))
    theirs = train(config_for(tmp_path / "cpu", model, rows, device="cpu", **base))
    for a, b in zip(ours.history, theirs.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
        assert a["targets"] == b["targets"]
    assert ours.history[-1]["eval_loss"] == pytest.approx(theirs.history[-1]["eval_loss"], rel=2e-2)
    if lora:
        peft = pytest.importorskip("peft")
        peft.AutoPeftModelForCausalLM.from_pretrained(ours.result)
    else:
        transformers.AutoModelForCausalLM.from_pretrained(ours.result)


def test_resumed_is_uninterrupted_in_f32(tmp_path, model, rows) -> None:
    # One cache: products whose algorithm is timed anew may sum in another order.
    base = {"recipe": "fp32", "device": "cuda", "save_steps": 2, "lora": True, "lora_dropout": 0.1}
    base["cache_dir"] = str(tmp_path / "cache")
    whole = train(config_for(tmp_path / "whole", model, rows, max_steps=6, lr_scheduler_type="constant", **base))
    part = config_for(tmp_path / "part", model, rows, lr_scheduler_type="constant", **base)
    train({**part, "max_steps": 2})
    resumed = train({**part, "max_steps": 6, "resume_from_checkpoint": True})
    assert [r["loss"] for r in resumed.history] == [r["loss"] for r in whole.history[2:]]
    assert same_files(whole.result, resumed.result)


def test_a_plan_beyond_the_gpu_is_refused(tmp_path, model, rows) -> None:
    from surogate.errors import UserError

    config = config_for(
        tmp_path, model, rows, device="cuda", sequence_len=1 << 17, per_device_train_batch_size=4096, max_steps=1
    )
    with pytest.raises(UserError, match="of GPU memory"):
        train(config)
