"""Narrow formats over all bit patterns: the reference against PyTorch, the kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from surogate.ops import Sample, get_op
from surogate.ops.formats import E2M1, E4M3, E5M2, Format
from surogate.ops.philox import random_words
from surogate.ops.quantize_fp8 import AMAX, HISTORY, SCALE
from tests.ops.harness import make_case, run_native

FP8 = [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")]


def every_bf16() -> np.ndarray:
    """All bit patterns of bf16 as float32."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def edges(form: Format) -> np.ndarray:
    """Values, the middles between neighbours, and the float32 next to each, of both signs."""
    values = np.sort(form.values[np.isfinite(form.values)])
    at = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    return np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(-np.inf))])


@pytest.mark.parametrize("form,name", FP8)
def test_values_are_those_of_torch(form: Format, name: str) -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).to(torch.float64).numpy()
    np.testing.assert_array_equal(form.values, codes)


@pytest.mark.parametrize("form,name", FP8)
def test_rounds_as_torch_does(form: Format, name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([every_bf16(), edges(form), np.float32([448.0, 464.0, 465.0, 61440.0, 1e30])])
    limited = torch.from_numpy(x).clamp(-form.top, form.top)  # torch does not saturate
    wanted = limited.to(getattr(torch, name)).view(torch.uint8).numpy()
    found, there = form.encode(x), ~np.isnan(x)
    np.testing.assert_array_equal(found[there], wanted[there])
    assert np.isnan(form.decode(found[~there])).all() and (~there).any()


def test_e2m1_is_the_nearest_of_sixteen() -> None:
    assert E2M1.values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    x = np.concatenate([every_bf16(), edges(E2M1)]).astype(np.float64)
    x = x[~np.isnan(x)]
    found = E2M1.encode(x)
    limited = np.clip(x, -6, 6)
    distance = np.abs(limited[:, None] - E2M1.values)
    assert np.array_equal(np.abs(limited - E2M1.decode(found)), distance.min(1))
    ties = (distance == distance.min(1, keepdims=True))[:, 1:8].sum(1) > 1  # without the two zeros
    assert ties.any() and (found[ties] % 2 == 0).all()
    assert np.array_equal(np.signbit(x), found >= 8)
    assert E2M1.encode(np.array([np.nan]))[0] == 7


@pytest.mark.parametrize("form,e5m2", [(E4M3, False), (E5M2, True)])
@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**-5])
def test_kernel_has_the_bits_of_the_reference(form: Format, e5m2: bool, scale: float) -> None:
    x = np.concatenate([every_bf16(), np.resize(edges(form) / np.float32(scale), 4096)])[None]
    case = make_case(get_op("quantize_fp8"), Sample([x, None, np.array([scale, 1 / scale])], {"e5m2": e5m2}))
    np.testing.assert_array_equal(run_native(case)[0], case.op.reference(case.operands(), case.attrs)[0])


@pytest.mark.parametrize("amax", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(amax: float) -> None:
    x = np.ones((3, 50))
    x[1, 7] = amax
    case = make_case(get_op("quantize_fp8"), Sample([x, np.zeros(64), None], {"e5m2": False}))
    q, scale, state = run_native(case)
    np.testing.assert_equal(state[AMAX], amax)
    assert scale[0] == 1.0
    np.testing.assert_equal(E4M3.decode(q)[1, 7], np.nan if np.isnan(amax) else 448.0)


def test_a_spike_saturates_and_the_next_scale_fits_it() -> None:
    quantize, update = get_op("quantize_fp8"), get_op("fp8_update_scales")
    rng, state, errors = np.random.default_rng(0), np.zeros(64), []
    for step in range(8):
        x = rng.normal(size=(40, 30)) * (100.0 if step in (3, 4) else 1.0)
        q, scale, state = run_native(make_case(quantize, Sample([x, state, None], {"e5m2": False})))
        y = E4M3.decode(q) / scale[0]
        assert np.isfinite(y).all()
        errors.append(np.abs(y - x).max() / np.abs(x).max())
        attrs = {"width": 64, "history": 3, "e5m2": False}
        (state,) = run_native(make_case(update, Sample([state], attrs)))
    assert errors[3] > 0.5  # the spike itself is cut off
    assert max(errors[:3] + errors[4:]) < 2.0**-4  # all else has four digits
    assert state[SCALE] == E4M3.scale_for(state[HISTORY : HISTORY + 3].max()) > 64  # and the spike is forgotten


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1])
def test_scale_is_the_largest_power_of_two_that_fits(form: Format) -> None:
    for amax in [1e-3, 1.0, 1.75, np.nextafter(np.float32(1.75), np.float32(2)), 3.1e4, 1e30, 1.5, 2.0**-80]:
        scale = form.scale_for(float(amax))
        assert np.log2(scale) % 1 == 0 and float(amax) * scale <= form.top < float(amax) * scale * 2
    assert form.scale_for(0.0) == form.scale_for(np.inf) == form.scale_for(np.nan) == 1.0
    assert np.isfinite(1 / form.scale_for(1e-40))


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1])
def test_stochastic_rounding_is_unbiased(form: Format) -> None:
    """Among 1e6 draws, each neighbour as often as its nearness says: chi-square with one degree of freedom."""
    n = 1_000_000
    words = random_words(n, seed=5, salt=9)
    for x in (0.3 * form.values[1], 1.1, -2.7, form.top * 0.9):
        found = form.decode(form.encode(np.full(n, x), words))
        magnitudes = np.sort(np.abs(form.values[np.isfinite(form.values)]))
        low, high = magnitudes[magnitudes <= abs(x)].max(), magnitudes[magnitudes > abs(x)].min()
        assert set(np.unique(np.abs(found))) == {low, high}
        up, p = (np.abs(found) == high).sum(), (abs(x) - low) / (high - low)
        assert (up - n * p) ** 2 / (n * p * (1 - p)) < 15.1  # one in ten thousand
    assert np.array_equal(form.encode(form.values[: form.largest], words[: form.largest]), np.arange(form.largest))
