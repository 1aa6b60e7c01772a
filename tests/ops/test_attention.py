"""Attention against PyTorch's, at its extremes, and on boundaries that it must refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surogate.ops import Sample, get_op
from tests.ops.harness import assert_close, make_case, run_native, run_reference


def _sample(
    boundaries: list[int], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, window: int = 0, size: float = 1.0
) -> Sample:
    rng = np.random.default_rng(3)
    shapes = [(boundaries[-1], h, dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (size * rng.normal(size=s) for s in shapes)
    return Sample([q, k, v, np.array(boundaries)], {"scale": dim**-0.5, "window": window})


def _backward(sample: Sample, do: np.ndarray) -> Sample:
    o, lse = get_op("attention").reference(sample.inputs, sample.attrs)
    *qkv, cu = sample.inputs
    return Sample([do, *qkv, o, lse, cu], sample.attrs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 5])
def test_reference_is_pytorch_a_document(window: int) -> None:
    sample = _sample([0, 3, 20, 33], window=window)
    do = np.random.default_rng(4).normal(size=(33, 4, 16))
    o, lse = get_op("attention").reference(sample.inputs, sample.attrs)
    grads = get_op("attention_backward").reference(_backward(sample, do).inputs, sample.attrs)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in sample.inputs[:3])
    for begin, end in [(0, 3), (3, 20), (20, 33)]:
        rows = slice(begin, end)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = (distance >= 0) & ((distance < window) if window else True)
        parts = [x[rows].transpose(0, 1) for x in (q, k, v)]
        found = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        np.testing.assert_allclose(found.detach().transpose(0, 1), o[rows], atol=1e-12)
        found.backward(torch.tensor(do[rows]).transpose(0, 1))
    for x, grad in zip((q, k, v), grads, strict=True):
        np.testing.assert_allclose(x.grad, grad, atol=1e-12)


def test_huge_scores_stay_finite() -> None:
    sample = _sample([0, 70, 400], heads=2, kv_heads=1, size=60.0)
    case = make_case(get_op("attention"), sample)
    o, lse = run_native(case)
    assert np.isfinite(o).all()
    np.testing.assert_allclose(lse, run_reference(case)[1], rtol=1e-6, atol=1e-2)  # scores of some 1e4


@pytest.mark.parametrize("operand", range(3))
def test_nan_shows(operand: int) -> None:
    sample = _sample([0, 70])
    sample.inputs[operand][40, 0, 0] = np.nan
    o, _ = run_native(make_case(get_op("attention"), sample))
    assert np.isnan(o[69] if operand else o[40]).any()
    if operand < 2:  # of v, rows of the same block may show it too: 0 * NaN
        assert np.isfinite(o[:40]).all()


@pytest.mark.parametrize("boundaries", [[0, 1, 130], [0, 700], [0, 65, 650, 700]])
@pytest.mark.parametrize("window", [0, 1, 130])
def test_backward_divided_among_many_threads_is_the_same(boundaries: list[int], window: int) -> None:
    sample = _sample(boundaries, window=window, heads=3, kv_heads=3, dim=8)
    do = np.random.default_rng(4).normal(size=sample.inputs[0].shape)
    case = make_case(get_op("attention_backward"), _backward(sample, do))
    one = run_native(case, threads=1)
    assert_close(case, one, run_reference(case))
    for threads in (2, 4, 13):
        for a, b in zip(one, run_native(case, threads=threads), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("boundaries", [[0, 8], [1, 10], [0, 7, 5, 10], [0, 11]])
def test_wrong_boundaries_are_refused(boundaries: list[int]) -> None:
    sample = _sample([0, 10])
    sample.inputs[3] = np.array(boundaries)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        run_native(make_case(get_op("attention"), sample))
