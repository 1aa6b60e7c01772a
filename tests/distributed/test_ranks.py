"""Several ranks are one: losses, weights, evaluation and checkpoints do not depend on how many share a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.compile import collectives
from surogate.config import make_config
from surogate.errors import TrainingFailed, UserError
from surogate.train import Run
from surogate.train.ranks import Ranks
from tests.train.support import config_for, same_files, train, weights_of, write_model, write_rows

LORA = {"lora": True, "lora_rank": 4, "lora_dropout": 0.1}
FULL: dict[str, Any] = {}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return write_model(folder / "model"), write_rows(folder / "rows.jsonl", rows=21)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 20_000)


def go(folder: Path, files: tuple[Path, Path], **changes: Any) -> Run:
    folder.mkdir(exist_ok=True)
    settings = {"device": "cpu", "per_device_train_batch_size": 1, "num_train_epochs": 2, "weight_decay": 0.1}
    return train(config_for(folder, *files, **{**settings, **changes}))


def figures(run: Run) -> np.ndarray:
    return np.array([[h["loss"], h["grad_norm"], h["tokens"], h["targets"]] for h in run.history])


def test_ranks_share_a_batch_as_passes_do(tmp_path: Path, files: tuple[Path, Path]) -> None:
    """21 rows do not fill the last batch of an epoch: some ranks then have padding alone."""
    for name, kind in (("lora", LORA), ("full", FULL)):
        kind = {**kind, "validation_split_ratio": 0.2, "eval_steps": 2, "sample_packing": False}
        alone = go(tmp_path / f"{name}-1", files, gradient_accumulation_steps=4, **kind)
        for ranks in (2, 4):
            shared = go(tmp_path / f"{name}-{ranks}", files, gradient_accumulation_steps=4 // ranks, cpu_ranks=ranks,
                        **kind)  # fmt: skip
            a, b = figures(alone), figures(shared)
            assert (a[:, 2:] == b[:, 2:]).all()
            assert np.abs(a[:, 0] - b[:, 0]).max() < 1e-6 and np.abs(a[:, 1] / b[:, 1] - 1).max() < 1e-5
            evaluated = [[h["eval_loss"] for h in r.history if "eval_loss" in h] for r in (alone, shared)]
            assert len(evaluated[0]) > 1 and np.allclose(*evaluated, rtol=0, atol=1e-6)
            found, expected = weights_of(shared.result), weights_of(alone.result)
            # Adam turns a gradient near zero into a step of a size that hardly depends on it: hence not 1e-6.
            assert max(np.abs(found[n] - expected[n]).max() for n in expected) < 1e-4


@pytest.mark.parametrize(
    "kind",
    [LORA, {"optim": "adamw_8bit"}, {"recipe": "bf16", "moments_dtype": "bfloat16"},
     {"recipe": "bf16", "master_weights": False}],
    ids=["lora", "8bit", "bf16-moments", "bf16-rounded"],
)  # fmt: skip
def test_levels_of_zero_are_the_same_bits(tmp_path: Path, files: tuple[Path, Path], kind: dict[str, Any]) -> None:
    kind = {**kind, "gradient_accumulation_steps": 2, "cpu_ranks": 3, "max_steps": 3}
    runs = [go(tmp_path / str(level), files, zero_level=level, **kind) for level in (0, 1)]
    assert (figures(runs[0]) == figures(runs[1])).all()
    assert same_files(runs[0].result, runs[1].result)


def test_states_are_shared_out(tmp_path: Path, files: tuple[Path, Path]) -> None:
    plans = []
    for level in (0, 1):
        run = go(tmp_path / str(level), files, zero_level=level, cpu_ranks=4, max_steps=1)
        lines = [json.loads(line) for line in (run.output_dir / "events.jsonl").read_text().splitlines()]
        plans.append(next(e["table"]["optimizer"] for e in lines if e["event"] == "memory"))
    assert plans[1] * 4 == pytest.approx(plans[0], rel=0.01)


@pytest.mark.parametrize("kind", [LORA, {"optim": "adamw_8bit"}], ids=["lora", "8bit"])
def test_a_checkpoint_goes_on_with_other_ranks(
    tmp_path: Path, files: tuple[Path, Path], kind: dict[str, Any]
) -> None:  # fmt: skip
    whole = {**kind, "max_steps": 4, "save_steps": 2}
    wanted = figures(go(tmp_path / "whole", files, gradient_accumulation_steps=4, **whole))
    for n, m in ((1, 4), (4, 2), (2, 1)):
        folder = tmp_path / f"{n}-{m}"
        for ranks, resume in ((n, False), (m, str(folder / "out" / "checkpoint-2"))):
            run = go(folder, files, **whole, cpu_ranks=ranks, gradient_accumulation_steps=4 // ranks,
                     zero_level=int(ranks > 1), resume_from_checkpoint=resume)  # fmt: skip
        assert len(run.history) == 2
        assert np.abs(figures(run)[:, 0] - wanted[2:, 0]).max() < 2e-6


def test_late_communication_changes_nothing(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives that are held up at random: a dependency that the compiler forgot would show."""
    steps = {"cpu_ranks": 2, "zero_level": 1, "max_steps": 3}
    plain = go(tmp_path / "plain", files, **steps)
    build = Ranks.__init__

    def slow(self: Ranks, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        for rank, member in enumerate(self.members):
            member.engine.inject_delays(rank + 1, 400)

    monkeypatch.setattr(Ranks, "__init__", slow)
    held_up = go(tmp_path / "slow", files, **steps)
    assert (figures(plain) == figures(held_up)).all() and same_files(plain.result, held_up.result)


def test_a_rank_that_fails_stops_the_run(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message, of the rank that failed, and no checkpoint of the step."""
    step = Ranks.train_step

    def broken(self: Ranks, feeder: Any, *arguments: Any) -> Any:
        if arguments[-1] == 2:
            ref = next(w.ref for n, w in self.compiled.weights.items() if n.endswith("q_proj.weight"))
            self.members[1].write(ref, np.full(ref.shape, np.nan, np.float32))
        return step(self, feeder, *arguments)

    monkeypatch.setattr(Ranks, "train_step", broken)
    with pytest.raises(TrainingFailed, match="rank 1 of 2 has stopped: .*has a NaN"):
        go(tmp_path / "run", files, cpu_ranks=2, max_steps=4, save_steps=1, debug="check_nan")
    assert [p.name for p in (tmp_path / "run" / "out").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize(
    "keys, where",
    [({"cpu_ranks": 2}, "cpu_ranks"), ({"device": "cpu", "zero_level": 1}, "zero_level")],
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as error:
        make_config({"model": "m", "datasets": [{"path": "x.jsonl"}], **keys})
    assert error.value.where == where
