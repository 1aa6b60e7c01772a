"""Whole steps: the global batch, what is not applied, seeds, and that Python has no part in them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from surogate import _native
from surogate.adapters.lora import LoraOptions
from surogate.models import architectures
from surogate.optim.adamw import AdamW
from tests.native.test_feeder import write_shard
from tests.support import make_runtime

CONFIG = architectures()["llama"].TINY
LENGTH, BATCH = 24, 2


def runtime(threads: int = 2, **options):
    r = make_runtime(
        CONFIG, batch=BATCH, sequence_len=LENGTH, max_documents=4, threads=threads, optimizer=AdamW(weight_decay=0.1),
        **options,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for name in r.compiled.weights:
        target = r.array(name)
        target[...] = rng.normal(size=target.shape) * 0.1
    return r


def feeder(folder: Path, rows: int = 16, masked: range = range(0)) -> _native.Feeder:
    rng = np.random.default_rng(1)
    mask = np.ones((rows, LENGTH), np.uint8)
    mask[list(masked)] = 0
    files = write_shard(folder, rng.integers(1, CONFIG["vocab_size"], rows * LENGTH), mask.reshape(-1))
    pieces = np.array([[i * LENGTH, LENGTH, 0] for i in range(rows)], np.int64)
    return _native.Feeder(*files, pieces, np.arange(rows + 1, dtype=np.int64), BATCH, LENGTH, 4, 0)


def scalars(step: int, lr: float = 1e-2) -> dict[str, float]:
    return {"lr": lr, "bias_correction1": 1 - 0.9**step, "bias_correction2": 1 - 0.999**step}


def weights(r) -> bytes:
    return b"".join(r.array(n).tobytes() for n in r.compiled.weights)


def test_loss_is_that_of_the_global_batch(tmp_path) -> None:
    """Four micro-batches with accumulation equal the sum of each alone; the scale is 1 / all targets."""
    together = runtime().train_step(feeder(tmp_path), 4, scalars(1, lr=0.0), 0, 1)
    one_by_one, r = feeder(tmp_path), runtime()
    parts = [r.train_step(one_by_one, 1, scalars(1, lr=0.0), 0, 1) for _ in range(4)]
    assert together["targets"] == sum(p["targets"] for p in parts) == 8 * (LENGTH - 1)
    assert together["loss_sum"] == pytest.approx(sum(p["loss_sum"] for p in parts), rel=1e-12)
    assert together["loss"] == together["loss_sum"] / together["targets"]
    assert together["tokens"] == 8 * LENGTH and together["applied"]


def test_a_micro_batch_without_targets_contributes_nothing(tmp_path) -> None:
    r = runtime()
    result = r.train_step(feeder(tmp_path, masked=range(2, 4)), 2, scalars(1), 0, 1)
    alone = runtime()
    expected = alone.train_step(feeder(tmp_path), 1, scalars(1), 0, 1)
    assert result["targets"] == expected["targets"] and result["loss_sum"] == expected["loss_sum"]
    assert weights(r) == weights(alone)


def test_a_step_without_targets_has_loss_zero(tmp_path) -> None:
    result = runtime().train_step(feeder(tmp_path, masked=range(16)), 2, scalars(1), 0, 1)
    assert (result["targets"], result["loss"], result["grad_norm"]) == (0, 0.0, 0.0)


def test_what_is_not_finite_is_not_applied(tmp_path) -> None:
    r = runtime()
    r.array("model.layers.1.mlp.up_proj.weight")[0, 0] = np.inf
    before = weights(r)
    result = r.train_step(feeder(tmp_path), 2, scalars(1), 0, 1)
    assert not result["applied"] and not np.isfinite(result["grad_norm"])
    assert weights(r) == before


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=3, dropout=0.2)])
def test_threads_change_no_bit(tmp_path, lora) -> None:
    found = []
    for threads in (1, 2, 3):
        r = runtime(threads, lora=lora)
        feed = feeder(tmp_path)
        losses = [r.train_step(feed, 2, scalars(s), 5, s)["loss_sum"] for s in (1, 2, 3)]
        found.append((losses, weights(r)))
    assert found[0] == found[1] == found[2]


def test_micro_seed_is_splitmix64() -> None:
    def mix(x: int) -> int:
        mask = (1 << 64) - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, step, micro in [(0, 1, 0), (42, 7, 3), (2**63 - 1, 10**6, 12)]:
        assert _native.micro_seed(seed, step, micro) == mix(mix(mix(seed) ^ step) ^ micro) >> 1
    assert len({_native.micro_seed(1, s, m) for s in range(50) for m in range(50)}) == 2500


def test_no_python_runs_inside_a_step(tmp_path) -> None:
    """On the calling thread no Python frame is entered between the call and its return; another thread, meanwhile,
    runs Python: the GIL is free."""
    r, feed = runtime(), feeder(tmp_path)
    entered: list[str] = []
    beats, stop = [0], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            beats[0] += 1

    other = threading.Thread(target=beat)
    other.start()
    call, arguments = r.engine.train_step, (feed, 8, scalars(1), 0, 1)
    before = beats[0]
    sys.setprofile(lambda frame, event, arg: entered.append(f"{event} {frame.f_code.co_name}"))
    call(*arguments)
    sys.setprofile(None)
    after = beats[0]
    stop.set()
    other.join()
    frames = [e for e in entered if e.startswith(("call ", "return "))]
    assert not frames, frames
    assert after > before + 100


def test_evaluate_weighs_by_tokens(tmp_path) -> None:
    r = runtime(evaluate=True)
    whole = r.evaluate(feeder(tmp_path), 8)
    feed = feeder(tmp_path)
    parts = [r.evaluate(feed, n) for n in (1, 3, 4)]
    assert whole["loss_sum"] == pytest.approx(sum(p["loss_sum"] for p in parts), rel=1e-12)
    assert whole["targets"] == sum(p["targets"] for p in parts)
    assert weights(r) == weights(runtime(evaluate=True))


def test_engine_takes_what_the_plan_says() -> None:
    r = runtime(lora=LoraOptions(rank=2), evaluate=True)
    memory = r.compiled.memory
    assert r.engine.allocated() == {"device": memory.size("device")}
    assert sum(memory.table().values()) == memory.size("device")
    with pytest.raises(ValueError, match="outside"):
        r.engine.memory("device", memory.size("device"), 1)
