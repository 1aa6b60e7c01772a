"""What goes wrong with loss, batches and resumed runs elsewhere: trials end to end, beside PyTorch.

The model is tiny and random; the oracle is transformers on torch, one row at a time: the sum of the losses of all
target tokens over their number.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.train.support import config_for, train, write_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Row = tuple[list[int], list[int]]  # ids; labels, -100 where nothing is trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def oracle(model: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def rows_with(*targets: int, prompt: int = 5, seed: int = 0) -> list[Row]:
    """Rows of random ids: a prompt that is not trained, and so many targets."""
    rng = np.random.default_rng(seed)
    rows = []
    for count in targets:
        ids = rng.integers(1, 420, prompt + count).tolist()
        rows.append((ids, [-100] * prompt + ids[prompt:]))
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids, "labels": labels}) + "\n" for ids, labels in rows))
    return path


def expected(oracle, rows: list[Row]) -> tuple[float, float]:
    """Loss and norm of its gradient over all targets of these rows."""
    count = sum(label != -100 for _, labels in rows for label in labels)
    oracle.zero_grad()
    total = 0.0
    for ids, labels in rows:
        loss = oracle(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]), num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    norms = [p.grad.norm() for p in oracle.parameters() if p.grad is not None]
    return total, float(torch.stack(norms).norm())


def first_step(tmp_path: Path, model: Path, rows: list[Row], batch: int, accumulation: int, **changes) -> dict:
    config = config_for(
        tmp_path / f"{batch}x{accumulation}", model, write(tmp_path / "rows.jsonl", rows), max_steps=1,
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, sample_packing=False, **changes,
    )  # fmt: skip
    config["datasets"][0]["type"] = "pretokenized"
    del config["chat_template"]
    return train(config).history[0]


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (1, 8), (2, 4)])
def test_01_gradient_accumulation_changes_neither_loss_nor_gradient(
    batch: int, accumulation: int, tmp_path: Path, model: Path, oracle
) -> None:
    rows = rows_with(3, 60, 17, 1, 30, 8, 45, 22)
    loss, norm = expected(oracle, rows)
    step = first_step(tmp_path, model, rows, batch, accumulation)
    assert step["targets"] == 186
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (1, 2)])
def test_02_rows_weigh_by_their_tokens(batch: int, accumulation: int, tmp_path: Path, model: Path, oracle) -> None:
    rows = rows_with(3, 60)
    loss, norm = expected(oracle, rows)
    mean_of_means = sum(expected(oracle, [row])[0] for row in rows) / 2
    assert abs(mean_of_means - loss) > 1e-2 * loss  # the trial tells the two apart
    step = first_step(tmp_path, model, rows, batch, accumulation)
    assert step["loss"] == pytest.approx(loss, rel=1e-5) and step["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_03_evaluation_weighs_tokens_over_the_whole_set(size: int, tmp_path: Path, model: Path, oracle) -> None:
    rows = rows_with(3, 60, 17, 1, 30, 8, 45, seed=1)
    held = write(tmp_path / "held.jsonl", rows)
    step = first_step(
        tmp_path, model, rows_with(4), 1, 1, learning_rate=0.0, per_device_eval_batch_size=size,
        validation_datasets=[{"path": str(held), "type": "pretokenized"}],
    )  # fmt: skip
    assert step["eval_loss"] == pytest.approx(expected(oracle, rows)[0], rel=1e-5)


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (1, 4)])
def test_04_a_row_without_targets_contributes_nothing(
    batch: int, accumulation: int, tmp_path: Path, model: Path, oracle
) -> None:
    """It is left out, so with accumulation one micro-batch is empty."""
    rows = rows_with(3, 60, 17)
    silent = (rows[1][0], [-100] * len(rows[1][0]))
    step = first_step(tmp_path, model, [rows[0], silent, *rows[1:]], batch, accumulation)
    loss, norm = expected(oracle, rows)
    assert step["targets"] == 80
    assert step["loss"] == pytest.approx(loss, rel=1e-5) and step["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_04_a_piece_of_a_row_without_targets_contributes_nothing(tmp_path: Path, model: Path) -> None:
    """A row that is split: its first piece, a micro-batch of its own, is all prompt."""
    rows = rows_with(10, prompt=30)
    step = first_step(tmp_path, model, rows, 1, 2, sequence_len=20, truncation="split")
    assert step["targets"] == 10 and math.isfinite(step["loss"]) and 0 < step["grad_norm"] < math.inf


def test_11_a_packed_row_has_the_loss_that_it_has_alone(tmp_path: Path, model: Path, oracle) -> None:
    """Random ids: a neighbour that is seen, or positions that run on, change the loss by far more than this."""
    rows = rows_with(3, 20, 17, 1, 30, 8, 12, 22, seed=2)
    loss, norm = expected(oracle, rows)
    config = config_for(
        tmp_path, model, write(tmp_path / "rows.jsonl", rows), max_steps=1, per_device_train_batch_size=2,
        datasets=[{"path": str(tmp_path / "rows.jsonl")}], sequence_len=96,
    )  # fmt: skip
    del config["chat_template"]
    run = train(config)
    step = run.history[0]
    assert step["targets"] == 113 and step["tokens"] == 153  # all rows in the two sequences of one step
    assert step["loss"] == pytest.approx(loss, rel=1e-5) and step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    data = next(e for e in events(tmp_path) if e["event"] == "data")
    assert data["positions_used"] == pytest.approx(153 / 192)


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text().splitlines()]


def test_20_nothing_prompts(tmp_path: Path, model: Path) -> None:
    """No terminal, and an input on which nobody ever writes: a question would wait for ever."""
    config = config_for(tmp_path, model, write(tmp_path / "rows.jsonl", rows_with(4, 5)), max_steps=1)
    config["datasets"][0]["type"] = "pretokenized"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "surogate", "sft", str(tmp_path / "config.yaml")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        assert process.wait(timeout=120) == 0, process.stdout.read().decode()  # type: ignore[union-attr]
    assert events(tmp_path)[-1]["status"] == "done"
