"""What a step computes does not depend on how its rows are cut into sequences, micro-batches and threads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from surogate.adapters.lora import LoraOptions
from surogate.config import make_config
from surogate.models import architectures
from surogate.train.order import training_order
from surogate.train.runtime import Runtime
from surogate.train.setup import ModelFiles, load_weights, prepare_data
from tests.support import make_runtime
from tests.train.support import config_for, same_files, train, weights_of, write_model, write_rows

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 24)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("sequence_len", [96, 384])
def test_final_weights_do_not_depend_on_the_split(tmp_path, model, rows, lora, sequence_len) -> None:
    """SGD-like settings: with a large epsilon Adam does not blow rounding of tiny gradients up to whole steps. Eight
    sequences of 384 tokens are more than the CPU takes in one pass."""
    found = []
    for batch, accumulation in [(8, 1), (2, 4), (1, 8)]:
        config = config_for(
            tmp_path / f"{batch}", model, rows, per_device_train_batch_size=batch, max_steps=6, lora=lora,
            gradient_accumulation_steps=accumulation, adam_epsilon=1e-3, learning_rate=1e-2, warmup_steps=2,
            sequence_len=sequence_len,
        )  # fmt: skip
        found.append(weights_of(train(config).result))
    start = weights_of(model)
    for other in found[1:]:
        for name, expected in found[0].items():
            assert np.abs(other[name] - expected).max() < 1e-5 * max(1.0, np.abs(expected).max()), name
    moved = [n for n, w in found[0].items() if n not in start or np.abs(w - start[n]).max() > 1e-3]
    assert len(moved) > 10


def losses_by_row(tmp_path: Path, model: Path, rows: Path, packing: bool) -> list[tuple[list[int], float, int]]:
    """For every step of one sequence: its rows (by their first token), summed loss, and targets."""
    config = config_for(
        tmp_path, model, rows, learning_rate=0.0, sample_packing=packing, per_device_train_batch_size=1,
    )  # fmt: skip
    parsed = make_config(config)
    order = training_order(prepare_data(parsed, "sft")[0].train, parsed)
    history = train(config).history
    found = []
    for step, record in enumerate(history):
        pieces = order.pieces[order.sequences[step] : order.sequences[step + 1]]
        found.append((pieces[:, 0].tolist(), record["loss"] * record["targets"], record["targets"]))
    return found


def test_a_row_has_the_same_loss_packed_and_alone(tmp_path, model, rows) -> None:
    """Every packed sequence costs what its rows cost when each is trained by itself."""
    alone = losses_by_row(tmp_path / "alone", model, rows, packing=False)
    assert all(len(starts) == 1 for starts, _, _ in alone)
    by_row = {starts[0]: (loss, targets) for starts, loss, targets in alone}
    packed = losses_by_row(tmp_path / "packed", model, rows, packing=True)
    assert max(len(starts) for starts, _, _ in packed) > 1
    assert sorted(s for starts, _, _ in packed for s in starts) == sorted(by_row)
    for starts, loss, targets in packed:
        assert targets == sum(by_row[s][1] for s in starts)
        assert loss == pytest.approx(sum(by_row[s][0] for s in starts), rel=2e-6)


def write_masked(path: Path) -> Path:
    """Four rows of 32 ids; the first half of three of them has no target, and of one all but the last id."""
    rng = np.random.default_rng(3)
    lines = []
    for masked in (20, 0, 31, 20):
        ids = rng.integers(5, 400, 32).tolist()
        lines.append(json.dumps({"input_ids": ids, "labels": [-100] * masked + ids[masked:]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_has_no_target_contributes_nothing(tmp_path, model) -> None:
    """Cut into sequences of 16, three of eight have no target: as micro-batches they give neither NaN nor weight."""
    data = write_masked(tmp_path / "rows.jsonl")
    runs = []
    for batch, accumulation in [(8, 1), (1, 8)]:
        config = config_for(
            tmp_path / str(batch), model, data, datasets=[{"path": str(data)}], sequence_len=16, truncation="split",
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=3,
        )  # fmt: skip
        config.pop("chat_template")
        runs.append(train(config).history)
    assert runs[0][0]["targets"] == 12 + 31 + 1 + 12
    for a, b in zip(*runs, strict=True):
        assert np.isfinite(a["loss"]) and b["loss"] == pytest.approx(a["loss"], rel=2e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-5)


def test_a_row_that_trains_nothing_changes_no_bit(tmp_path, model, rows) -> None:
    silent = tmp_path / "more.jsonl"
    silent.write_text(json.dumps({"instruction": "well?", "output": ""}) + "\n" + rows.read_text())
    a = train(config_for(tmp_path / "a", model, rows, max_steps=3))
    b = train(config_for(tmp_path / "b", model, silent, max_steps=3))
    assert [r["loss"] for r in a.history] == [r["loss"] for r in b.history]


def test_evaluating_and_saving_change_no_bit(tmp_path, model, rows) -> None:
    """Training and evaluation share memory; a run that looks and saves after every step trains as one that does not."""
    base = {"max_steps": 4, "lora": True, "lora_dropout": 0.2, "validation_split_ratio": 0.2, "weight_decay": 0.1}
    plain = train(config_for(tmp_path / "plain", model, rows, **base))
    busy = train(config_for(tmp_path / "busy", model, rows, **base, eval_steps=1, save_steps=1))
    assert all("eval_loss" in r for r in busy.history)
    assert [r["loss"] for r in plain.history] == [r["loss"] for r in busy.history]
    assert plain.history[-1]["eval_loss"] == busy.history[-1]["eval_loss"]
    assert same_files(plain.result, busy.result)


def first_weights(lora: LoraOptions | None, **options) -> Runtime:
    config = {**architectures()["llama"].TINY, "initializer_range": 0.05}
    runtime = make_runtime(config, lora=lora, max_documents=4, **options)
    load_weights(runtime, ModelFiles("random", Path("."), config, None), seed=11)
    return runtime


def test_first_weights_follow_neither_layout_nor_threads() -> None:
    """Other batches, other threads, other adapted layers: the same name starts from the same values."""
    a = first_weights(LoraOptions(rank=4), batch=2, sequence_len=16, threads=1)
    b = first_weights(LoraOptions(rank=4, targets=("v_proj", "down_proj")), batch=1, sequence_len=64, threads=2)
    shared = [n for n in b.compiled.weights if n in a.compiled.weights]
    assert len(shared) == len(b.compiled.weights)
    assert len(a.compiled.weights) > len(shared) > len([n for n in shared if ".lora_" not in n])
    for name in shared:
        assert np.array_equal(a.values(name), b.values(name)), name
        if name.endswith("lora_B.weight"):
            assert not a.values(name).any()
    full = first_weights(None, batch=1, sequence_len=16, threads=1)
    drawn = full.values("model.layers.0.mlp.up_proj.weight")
    assert drawn.std() == pytest.approx(0.05, rel=0.05) and abs(drawn.mean()) < 0.002
    assert (full.values("model.norm.weight") == 1).all()


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4, dropout=0.1)])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_the_engine_takes_what_was_planned(lora, recipe: str) -> None:
    """To the byte: what is allocated, what the plan says, and the sum of the table that people see."""
    runtime = first_weights(lora, batch=2, sequence_len=32, recipe=recipe, evaluate=True)
    memory = runtime.compiled.memory
    assert runtime.engine.allocated() == {s: memory.size(s) for s in ("device", "pinned", "host") if memory.size(s)}
    assert sum(runtime.engine.allocated().values()) == sum(memory.table().values())
    ends = [r.end for p in runtime.compiled.programs.values() for i in p.instructions
            for r in [*i.inputs, *i.outputs, i.workspace] if r is not None]  # fmt: skip
    assert max(ends) <= memory.size("device") < max(ends) + 4096  # nothing lies outside, and no tail is idle
