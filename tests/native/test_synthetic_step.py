"""The engine's step over programs of a few instructions, so that every symbol's part in it can be seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate import _native
from tests.native.test_feeder import write_shard

LENGTH, BATCH, ROWS = 4, 2, 24
SLOT = 256  # bytes

# One slot a symbol, then the "weight" and its "gradient".
PLACES = {
    "ids": ("i32", BATCH * LENGTH),
    "targets": ("i32", BATCH * LENGTH),
    "positions": ("i32", BATCH * LENGTH),
    "cu_seqlens": ("i32", 2 * BATCH + 1),
    "loss": ("f64", 1),
    "loss_scale": ("f32", 1),
    "lr": ("f32", 1),
    "seed": ("i64", 1),
    "grad_norm": ("f32", 1),
    "weight": ("f32", 1),
    "gradient": ("f32", 1),
    "workspace": ("u8", SLOT),
}
NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}


def place(name: str, dtype: str | None = None, n: int | None = None) -> tuple:
    kind, count = PLACES[name]
    return ("device", list(PLACES).index(name) * SLOT, dtype or kind, (n or count,), (1,))


def op(name: str, inputs: list, outputs: list, **attrs) -> tuple:
    return (name, inputs, outputs, place("workspace"), attrs, "compute", [], -1)


ADD_SCALE = op("add", [place("gradient"), place("loss_scale")], [place("gradient")])
ADD_LOSS = op("sum_squares", [place("loss_scale"), place("loss")], [place("loss")])  # loss += loss_scale^2
NORM = op("copy", [place("gradient")], [place("grad_norm")])
UPDATE = [
    op("mul", [place("gradient"), place("lr")], [place("gradient")]),
    op("add", [place("weight"), place("gradient")], [place("weight")]),
    op("fill", [], [place("gradient")], value=0.0),
]
INPUTS = ("ids", "targets", "positions", "cu_seqlens")


class Step:
    """An engine whose weight grows by lr x (sum of loss_scale over the micro-batches); the norm is that sum."""

    def __init__(self, folder: Path, *, norm: bool = True, micro: tuple = (*INPUTS, "loss", "loss_scale", "seed"),
                 changed: dict | None = None, update_symbols: tuple = ("lr", "grad_norm")) -> None:  # fmt: skip
        self.engine = e = _native.Engine("cpu", 1)
        e.allocate("device", len(PLACES) * SLOT)
        e.load("micro_step", [ADD_SCALE, ADD_LOSS], {n: place(n) for n in micro} | (changed or {}), 0)
        if norm:
            e.load("norm_step", [NORM], {"grad_norm": place("grad_norm")}, 0)
        e.load("optimizer_step", UPDATE, {n: place(n) for n in update_symbols}, 0)
        files = write_shard(folder, np.arange(ROWS * LENGTH), np.ones(ROWS * LENGTH))
        pieces = np.array([[i * LENGTH, LENGTH, 0] for i in range(ROWS)], np.int64)
        order = np.arange(ROWS + 1, dtype=np.int64)
        self.feeder = _native.Feeder(*files, pieces, order, BATCH, LENGTH, 2 * BATCH, 0)

    def at(self, name: str) -> np.ndarray:
        _, offset, dtype, (n,), _ = place(name)
        kind = np.dtype(NUMPY[dtype])
        return self.engine.memory("device", offset, n * kind.itemsize).view(kind)

    def __call__(self, accumulation: int = 2, *, seed: int = 7, step: int = 3, **scalars: float) -> dict:
        return self.engine.train_step(self.feeder, accumulation, {"lr": 0.5} | scalars, seed, step)


def test_what_a_step_writes_and_returns(tmp_path) -> None:
    s = Step(tmp_path)
    s.at("loss")[:] = 99  # of an earlier step
    result = s(3)
    targets = 3 * BATCH * (LENGTH - 1)
    scale = np.float32(1 / targets)
    assert (result["targets"], result["tokens"], result["applied"]) == (targets, 3 * BATCH * LENGTH, True)
    assert s.at("loss_scale")[0] == scale
    assert result["loss_sum"] == pytest.approx(3 * float(scale) ** 2, rel=1e-12)
    assert result["grad_norm"] == pytest.approx(3 * scale, rel=1e-6)
    assert s.at("weight")[0] == pytest.approx(1.5 * scale, rel=1e-6) and s.at("gradient")[0] == 0
    assert s.at("seed")[0] == _native.micro_seed(7, 3, 2)  # of the last micro-batch
    first = 2 * BATCH * LENGTH  # so are the inputs
    assert s.at("ids").tolist() == list(range(first, first + BATCH * LENGTH))
    assert s.at("targets").tolist() == [first + 1, first + 2, first + 3, -100, first + 5, first + 6, first + 7, -100]
    assert s.at("positions").tolist() == [0, 1, 2, 3] * 2 and s.at("cu_seqlens").tolist() == [0, 4, 8, 8, 8]
    assert s.feeder.cursor == 3 * BATCH


@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_what_is_not_finite_stays_out_of_the_weights(tmp_path, poison: str) -> None:
    s = Step(tmp_path)
    result = s()
    before = s.at("weight").copy()
    if poison == "gradient":
        s.at("gradient")[:] = np.inf
    else:  # an infinite loss beside a finite norm
        s.engine.load("micro_step", [op("fill", [], [place("loss")], value=float("inf"))], {"loss": place("loss")}, 0)
    result = s()
    assert not result["applied"] and s.at("weight") == before
    assert not np.isfinite(result["grad_norm" if poison == "gradient" else "loss"])
    assert s.feeder.cursor == 4 * BATCH  # the micro-batches are spent


def test_without_a_norm_program_the_loss_decides(tmp_path) -> None:
    s = Step(tmp_path, norm=False)
    s.at("grad_norm")[:] = 2.5
    result = s()
    assert result["applied"] and result["grad_norm"] == 2.5 and s.at("weight")[0] > 0
    assert np.isnan(Step(tmp_path, norm=False, update_symbols=("lr",))()["grad_norm"])


def test_symbols_that_no_program_has_are_skipped(tmp_path) -> None:
    s = Step(tmp_path, micro=("loss",), update_symbols=())
    s.at("seed")[:], s.at("lr")[:] = 5, 2
    assert s(bias_correction1=0.1)["applied"]
    assert s.at("seed")[0] == 5 and s.at("lr")[0] == 2 and not s.at("ids").any()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ids": place("ids", n=3)}, "feeder's ids has 8 values; the program takes 3 of i32"),
        ({"ids": place("ids", dtype="f32")}, "the program takes 8 of f32"),
        ({"ids": ("device", 0, "i32", (4, 2), (3, 1))}, "dense"),
        ({"seed": place("seed", dtype="i32")}, "symbol seed: must be one i64"),
        ({"loss_scale": place("loss_scale", dtype="i32")}, "symbol loss_scale: must be one f32"),
        ({"loss": place("loss", n=2)}, "symbol loss: must be one f64"),
    ],
)
def test_symbols_of_another_form_are_refused(tmp_path, changed: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Step(tmp_path, changed=changed)()


def test_a_program_without_a_loss_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="micro_step has no symbol loss"):
        Step(tmp_path, micro=INPUTS)()


def test_the_end_of_the_order_and_no_accumulation(tmp_path) -> None:
    s = Step(tmp_path)
    with pytest.raises(ValueError, match="at least 1"):
        s(0)
    with pytest.raises(IndexError, match="order has ended"):
        s(ROWS // BATCH + 1)
    assert s.feeder.cursor == 0  # nothing of it was taken
    assert s(ROWS // BATCH)["tokens"] == ROWS * LENGTH


def test_other_seeds_for_other_steps_and_micro_batches() -> None:
    drawn = [_native.micro_seed(s, t, m) for s in range(8) for t in range(8) for m in range(8)]
    assert len(set(drawn)) == 512 and min(drawn) >= 0 and max(drawn) < 2**63
