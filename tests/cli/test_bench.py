"""``surogate bench`` runs the real step and accounts for it; how fast it is is no business of a test."""

from __future__ import annotations

import json

import pytest

from surogate.cli import main
from surogate.train import shapes


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_record(tmp_path, capsys, monkeypatch, mode: str) -> None:
    tiny = {**shapes.config_of("smollm2-135m"), "num_hidden_layers": 2, "vocab_size": 512}
    monkeypatch.setattr("surogate.train.bench.config_of", lambda name: tiny)
    monkeypatch.setattr("surogate.train.bench._SECONDS", 1e-4)  # rates need not be exact here
    path = tmp_path / "record.json"
    words = ["bench", "smollm2-135m", "--mode", mode, "--batch", "2", "--sequence-len", "24", "--accumulation", "2"]
    assert main([*words, "--steps", "2", "--json", str(path)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["tokens_per_step"] == 2 * 24 * 2 and len(record["all_steps"]) == 2
    assert record["memory_plan"]["total"] == sum(record["memory_allocated"].values())
    assert record["tokens_per_second"] == pytest.approx(record["tokens_per_step"] / record["step_seconds"])
    # The profile covers every instruction of the step, and no work is counted twice.
    assert sum(row["flops"] for row in record["profile"]) == record["flops_per_step"]
    assert 0 < record["floor_seconds"] and all(row["seconds"] >= 0 for row in record["profile"])


def test_unknown_shape_lists_the_known(capsys) -> None:
    assert main(["bench", "gpt-9"]) == 2
    assert "qwen3-0.6b" in capsys.readouterr().err


@pytest.mark.parametrize("name", shapes.names())
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    """Parameters as the model cards give them, to their precision."""
    from surogate.compile.compiler import CompileOptions, compile_model
    from surogate.models import build
    from surogate.recipes import get_recipe

    published = {
        "smollm2-135m": 134.515e6, "qwen2.5-0.5b": 494.0e6, "qwen2.5-1.5b": 1.5437e9, "qwen2.5-7b": 7.6156e9,
        "qwen3-0.6b": 596.05e6, "qwen3-1.7b": 1.7206e9, "qwen3-4b": 4.0225e9, "qwen3-8b": 8.1907e9,
        "qwen3-14b": 14.7683e9, "qwen3-32b": 32.762e9,
    }  # fmt: skip
    options = CompileOptions(1, 8, 1, get_recipe("fp32"), 1, 1, train=False)
    assert compile_model(build(shapes.config_of(name)), options).parameters == pytest.approx(published[name], rel=2e-4)
