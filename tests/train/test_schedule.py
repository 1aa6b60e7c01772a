"""Schedules are Hugging Face's, value for value; first weights follow their name and seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from surogate.train.initial import initialise
from surogate.train.schedule import Schedule
from surogate.train.setup import duration


@pytest.mark.parametrize("total", [1, 7, 50])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup", "wsd"])
def test_against_transformers(kind: str, warmup: int, total: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    decay = max(1, total // 5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    if kind == "wsd":
        theirs = transformers.get_wsd_schedule(
            optimizer, warmup, decay, num_training_steps=total, decay_type="linear", min_lr_ratio=0.0
        )
    else:
        theirs = transformers.get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    ours = Schedule(kind, 0.3, total, warmup, decay if kind == "wsd" else 0)
    for step in range(1, total + 1):
        assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_floor_against_transformers(ratio: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = transformers.get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=3, num_training_steps=40,
        scheduler_specific_kwargs={"min_lr_rate": ratio},
    )  # fmt: skip
    ours = Schedule("cosine", 0.3, 40, 3, 0, ratio)
    for step in range(1, 42):
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        optimizer.step()
        theirs.step()


def test_floor_of_a_line() -> None:
    schedule = Schedule("linear", 2.0, 1000, 0, 0, 0.25)
    assert [schedule.at(s) for s in (1, 501, 1001)] == pytest.approx([2.0, 1.25, 0.5])


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps", "total"),
    [
        (1, -1, (4,), 4),
        (2, -1, (4, 5), 9),
        (1.5, -1, (4, 5), 7),
        (0.1, -1, (4,), 1),
        (1e-9, -1, (4,), 1),
        (1.6, -1, (4, 5), 7),  # three of five steps, though 1.6 - 1 is a little more than 0.6
        (1, 6, (4, 5), 6),
        (9, 4, (4,), 4),
    ],
)
def test_duration(epochs: float, max_steps: int, steps: tuple[int, ...], total: int) -> None:
    found = duration([4, 5, 4, 4].__getitem__, epochs, max_steps)
    assert (found.epoch_steps, found.total) == (steps, total)
    assert found.epoch_of(1) == 1 and found.epoch_of(4) == (1 if total >= 4 else found.epochs)


def test_first_weights() -> None:
    a = np.empty((300, 500), np.float32)
    initialise(a, "normal", name="w", seed=1, std=0.02)
    assert abs(a.mean()) < 2e-4 and a.std() == pytest.approx(0.02, rel=0.01)
    b = np.empty((300, 500), np.float32)
    initialise(b, "lora_a", name="w", seed=1, std=9.0)
    bound = 500**-0.5  # torch's kaiming_uniform_ with a = sqrt(5)
    assert np.abs(b).max() <= bound and b.std() == pytest.approx(bound / 3**0.5, rel=0.01)
    again, other, seeded = (np.empty_like(a) for _ in range(3))
    initialise(again, "normal", name="w", seed=1, std=0.02)
    initialise(other, "normal", name="v", seed=1, std=0.02)
    initialise(seeded, "normal", name="w", seed=2, std=0.02)
    assert (again == a).all() and (other != a).any() and (seeded != a).any()
    bits = np.empty(7, np.uint16)
    initialise(bits, "ones", name="w", seed=1, std=0.02)
    assert ((bits.astype(np.uint32) << 16).view(np.float32) == 1).all()
