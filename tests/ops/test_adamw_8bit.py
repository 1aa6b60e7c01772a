"""Eight-bit moments against bitsandbytes: its table, its rounding, and its whole update."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from bitsandbytes.backends.cpu import ops as bnb_cpu

from surogate.ops import Sample, get_op
from surogate.ops.blockwise8 import BLOCK, dequantize, dynamic_map, quantize, table
from tests.ops.harness import make_case, run_native

ATTRS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.995, "eps": 1e-8, "weight_decay": 0.1, "salt": 3}


def their_quantize(x: np.ndarray, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bitsandbytes' path for other dtypes, which searches all numbers in float32; the one for float32 looks values up
    in a coarse table (it stores zeros as 1e-5 of the block's largest) and the one on GPUs divides approximately."""
    index, absmax = torch.ops.bitsandbytes.quantize_blockwise(
        torch.from_numpy(x.astype(np.float64)), torch.from_numpy(code), BLOCK
    )
    return index.numpy(), absmax.numpy()


@pytest.mark.parametrize("signed", [True, False])
def test_table_is_theirs(signed: bool) -> None:
    assert np.array_equal(dynamic_map(signed), bnb.create_dynamic_map(signed).numpy())


def _values(rng: np.random.Generator, signed: bool) -> np.ndarray:
    """Blocks of magnitudes over the whole table, of its numbers, their neighbours and the middles between them."""
    code = dynamic_map(signed)
    middles = (code[:-1].astype(np.float64) + code[1:]) / 2
    ends = np.concatenate([code, middles.astype(np.float32)])
    ends = np.concatenate([ends, np.nextafter(ends, np.float32(2)), np.nextafter(ends, np.float32(-2))])
    ends = np.clip(ends, -1 if signed else 0, 1)
    exact = np.zeros((-(-len(ends) // (BLOCK - 1)), BLOCK), np.float32)
    exact[:, 0] = 1.0  # the block's magnitude
    exact[:, 1:].flat[: len(ends)] = ends
    wide = rng.normal(size=(40, BLOCK)) * 10.0 ** rng.integers(-9, 1, size=(40, BLOCK))
    scaled = np.concatenate([exact * np.float32(s) for s in (1.0, 3e-7, 1e-30, 0.7e20)])
    tiny = np.full((1, BLOCK), 1e-40, np.float32)
    x = np.concatenate([scaled, (wide * 10.0 ** rng.integers(-20, 20, size=(40, 1))).astype(np.float32), 0 * tiny])
    return (x if signed else np.abs(x)).reshape(-1)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_theirs(signed: bool) -> None:
    code = dynamic_map(signed)
    x = _values(np.random.default_rng(0), signed)
    index, absmax = quantize(x, code)
    with np.errstate(all="ignore"):
        wanted, magnitudes = their_quantize(x, code)
    zero = np.repeat(absmax == 0, BLOCK)  # theirs divides by nothing there; both mean zeros
    assert np.array_equal(absmax, magnitudes) and np.array_equal(index[~zero], wanted[~zero])
    assert not dequantize(index, absmax, code)[zero].any()


@pytest.mark.parametrize("signed", [True, False])
def test_thresholds_part_the_numbers(signed: bool) -> None:
    """At a threshold the upper number is stored, one float below the lower; and no class of the kernels, values of one
    sign, exponent and seven bits of mantissa, holds two thresholds."""
    code, thresholds = dynamic_map(signed), table(signed)[256:511]
    assert np.array_equal(code, table(signed)[:256]) and np.isinf(table(signed)[511])
    for x, expected in [(thresholds, np.arange(1, 256)), (np.nextafter(thresholds, np.float32(-2)), np.arange(255))]:
        block = np.ones((255, BLOCK), np.float32)
        block[:, 1] = x
        assert np.array_equal(quantize(block.reshape(-1), code)[0].reshape(255, BLOCK)[:, 1], expected)
    assert np.abs(thresholds).min() > 2.0**-24
    assert len(np.unique(thresholds.view(np.uint32) >> 16)) == 255


def _update(run: Any, state: list[np.ndarray], lr: float, step: int, dtype: str = "f32") -> list[np.ndarray]:
    tables = [table(True).astype(np.float64), table(False).astype(np.float64)]
    scalars = [np.array([s]) for s in (lr, 1 - ATTRS["beta1"] ** step, 1 - ATTRS["beta2"] ** step, 0.5)]
    inputs = [*state[:4], *state[4:6], *tables, *scalars, None, None]
    return run(make_case(get_op("adamw_8bit"), Sample(inputs, dict(ATTRS), [dtype, None, "u8", "u8"] + [None] * 10)))[
        :6
    ]


def test_ten_steps_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """State bit for bit, weights to the last bits of float32; gradients of many magnitudes, and elements at rest."""

    def exact(x: torch.Tensor, code: torch.Tensor, absmax: torch.Tensor, index: torch.Tensor, size: int) -> None:
        found, magnitudes = their_quantize(x.numpy(), code.numpy())
        index.copy_(torch.from_numpy(found))
        absmax.copy_(torch.from_numpy(magnitudes))

    monkeypatch.setattr(bnb_cpu, "_quant_blockwise_fp32_direct", exact)
    rng = np.random.default_rng(1)
    n = 24 * BLOCK
    start = rng.normal(size=n).astype(np.float32)
    theirs = torch.tensor(start)
    m, v = torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
    absmax_m, absmax_v = torch.zeros(n // BLOCK), torch.zeros(n // BLOCK)
    zero, none = np.zeros(n, np.int64), np.zeros(n // BLOCK)
    ours = [start.astype(np.float64), None, zero, zero, none, none]
    for step in range(1, 11):
        gradient = (rng.normal(size=n) * 10.0 ** rng.integers(-5, 1, size=n)).astype(np.float32)
        gradient[rng.random(n) < 0.1] = 0.0
        lr = 1e-2 / step
        ours[1] = gradient.astype(np.float64)
        ours = _update(run_native, ours, lr, step)
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", torch.tensor(gradient), theirs, m, v, ATTRS["beta1"], ATTRS["beta2"], 0.0, 0.0, ATTRS["eps"], step,
            lr, torch.from_numpy(dynamic_map(True)), torch.from_numpy(dynamic_map(False)), absmax_m, absmax_v,
            ATTRS["weight_decay"], 0.5,
        )  # fmt: skip
        for found, wanted in zip(ours[2:], (m, v, absmax_m, absmax_v), strict=True):
            assert np.array_equal(found, wanted.numpy()), step
        np.testing.assert_allclose(ours[0], theirs.numpy(), rtol=1e-6, atol=1e-7)


def test_follows_adamw() -> None:
    """Eight bits lose little: a hundred steps end near those with float32 moments, nearer than the way gone."""
    rng = np.random.default_rng(2)
    n = 8 * BLOCK
    wide, narrow = (
        [np.zeros(n)] * 5,
        [np.zeros(n), None, np.zeros(n, np.int64), np.zeros(n, np.int64), *[np.zeros(8)] * 2],
    )
    direction = rng.normal(size=n)
    for step in range(1, 101):
        gradient = direction + 0.5 * rng.normal(size=n)
        scalars = [np.array([s]) for s in (1e-3, 1 - ATTRS["beta1"] ** step, 1 - ATTRS["beta2"] ** step, 0.5)]
        sample = Sample([wide[0], gradient, *wide[2:4], *scalars, None, None], dict(ATTRS))
        wide = run_native(make_case(get_op("adamw"), sample))
        narrow[1] = gradient
        narrow = _update(run_native, narrow, 1e-3, step)
    assert np.abs(narrow[0] - wide[0]).mean() < 0.05 * np.abs(wide[0]).mean()
