"""Random numbers: the generator against its published vectors, and what dropout makes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from surogate.ops import Sample, get_op
from surogate.ops.philox import philox4x32, random_words
from tests.ops.harness import Case, make_case, run_native, run_reference

Runner = Callable[[Case], list[np.ndarray | None]]

every_runner = pytest.mark.parametrize("run", [run_reference, run_native])


def dropout(run: Runner, x: np.ndarray, *, p: float, seed: int = 1, salt: int = 0) -> np.ndarray:
    sample = Sample([x, np.array([seed])], {"p": p, "salt": salt}, dtypes=["f32", "i64"])
    result = run(make_case(get_op("dropout"), sample))[0]
    assert result is not None
    return result


# Known-answer vectors of the Random123 library for philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter,key,result", VECTORS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    k0, k1 = words(key)
    assert philox4x32(np.array([words(counter)], np.uint32), (k0, k1)).tolist() == [words(result)]


def test_element_takes_its_word() -> None:
    """Element i has word i%4 of block i//4, with seed and salt split low word first."""
    seed, salt = -5, 3 << 32 | 9
    found = random_words(11, seed, salt)
    for i in range(11):
        block = philox4x32(np.array([[i // 4, 0, 9, 3]], np.uint32), (0xFFFFFFFB, 0xFFFFFFFF))
        assert found[i] == block[0, i % 4]


@every_runner
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_keeps_the_mean(run: Runner, p: float) -> None:
    kept = dropout(run, np.ones((61, 499)), p=p)
    assert np.allclose(kept[kept != 0], 1 / (1 - p), rtol=1e-6)
    rate, sigma = (kept != 0).mean(), np.sqrt(p * (1 - p) / kept.size)
    assert abs(rate - (1 - p)) < 5 * sigma


@every_runner
def test_dropout_of_nothing_is_the_identity(run: Runner) -> None:
    x = np.random.default_rng(0).normal(size=(5, 77)).astype(np.float32).astype(np.float64)
    assert np.array_equal(dropout(run, x, p=0.0), x)


@every_runner
def test_seeds_salts_and_neighbours_are_independent(run: Runner) -> None:
    x = np.ones((50, 400))
    base = dropout(run, x, p=0.5) != 0
    assert np.array_equal(base, dropout(run, x, p=0.5) != 0)
    others = {
        "seed": dropout(run, x, p=0.5, seed=2) != 0,
        "high half of the seed": dropout(run, x, p=0.5, seed=1 + (1 << 32)) != 0,
        "salt": dropout(run, x, p=0.5, salt=1) != 0,
        "next element": np.roll(base, 1),
        "next block": np.roll(base, 4),
        "next row": np.roll(base, 400),
    }
    for name, other in others.items():
        assert abs((base == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(base.size), name


def test_mask_depends_on_the_index_not_on_the_layout() -> None:
    """Rows of a wide column window, whose length is no multiple of a block, get the numbers of a dense tensor."""
    for shape in [(301, 7), (3, 5, 1031), (2, 40_000)]:
        sample = Sample([np.ones(shape), np.array([4])], {"p": 0.3, "salt": 2}, dtypes=["f32", "i64"])
        case = make_case(get_op("dropout"), sample)
        wanted = run_reference(case)[0] != 0
        for strided in (False, True):
            assert np.array_equal(run_native(case, strided=strided)[0] != 0, wanted)
