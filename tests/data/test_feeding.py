"""The data position is one number: from any step and epoch edge the same rows follow, however the batch is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate.config import make_config
from surogate.data import DataOptions, DatasetSpec, Tokenizer, prepare
from surogate.train.order import RunOrder, feeder, training_order
from tests.data.samples import STYLES, chat, write_rows

GLOBAL, LENGTH, EPOCHS = 12, 64, 3

# Ranks, sequences of a micro-batch, micro-batches of a step on each rank.
LAYOUTS = [(1, 12, 1), (1, 1, 12), (1, 4, 3), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)]


def run_order(folder: Path, batch: int, accumulation: int) -> RunOrder:
    rows = [chat(f"user: ask {i}", f"assistant: {'word ' * (i % 17)}end {i}") for i in range(331)]
    tokenizer = Tokenizer(STYLES["chatml"].write(folder / "tokenizer"))
    path = write_rows(folder / "rows.jsonl", rows)
    options = DataOptions([DatasetSpec(str(path))], folder / "cache", sequence_len=LENGTH, num_workers=1)
    config = make_config(
        {
            "model": "m", "datasets": [{"path": str(path)}], "sequence_len": LENGTH, "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation,
        }
    )  # fmt: skip
    return training_order(prepare(options, tokenizer, lambda line: None).train, config)


def sequences(order: RunOrder, batch: int, cursor: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of ``count`` sequences from ``cursor`` on, fed ``batch`` at a time."""
    feed = feeder(order, batch=batch, sequence_len=LENGTH, pad_id=0, cursor=cursor)
    found = []
    for _ in range(count // batch):
        fed = feed.next()
        ids, targets = (np.asarray(fed[name]).reshape(batch, LENGTH) for name in ("ids", "targets"))
        found += list(zip(ids.tolist(), targets.tolist(), strict=True))
    assert feed.cursor == cursor + count
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunOrder, list]:
    folder = tmp_path_factory.mktemp("data")
    order = run_order(folder, GLOBAL, 1)
    return folder, order, sequences(order, 1, 0, GLOBAL * order.duration.total)


def test_the_run_has_steps_in_every_epoch_and_each_epoch_has_every_row(whole: tuple) -> None:
    _, order, fed = whole
    steps = order.duration.epoch_steps
    assert len(steps) == EPOCHS and min(steps) >= 3
    ends = np.cumsum(steps) * GLOBAL
    for first, last in zip([0, *ends], ends, strict=False):
        rows = sorted(row for ids, _ in fed[first:last] for row in ids if row)
        assert rows == sorted(row for ids, _ in fed[: ends[0]] for row in ids if row)
    assert fed[: ends[0]] != fed[ends[0] : ends[1]]  # in another order


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), LAYOUTS)
def test_a_run_goes_on_with_the_same_rows_on_other_ranks_and_batches(
    ranks: int, batch: int, accumulation: int, whole: tuple
) -> None:
    """Every step from the one it is resumed at: what all ranks are fed is that step's part of the one order."""
    folder, order, fed = whole
    other = run_order(folder, ranks * batch, accumulation)
    assert np.array_equal(other.pieces, order.pieces) and other.duration == order.duration
    edge = order.duration.epoch_steps[0]
    for resumed in (0, 1, edge - 1, edge, edge + 1, order.duration.total - 1):
        for step in range(resumed, min(resumed + 2, order.duration.total)):
            got = []
            for micro in range(accumulation):
                for rank in range(ranks):
                    got += sequences(other, batch, step * GLOBAL + (micro * ranks + rank) * batch, batch)
            assert got == fed[step * GLOBAL : (step + 1) * GLOBAL]
