"""LM head and cross-entropy: gradient against slope and PyTorch, extremes, and targets that it must refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surogate.ops import Sample, get_op
from tests.ops.harness import make_case, run_native


def _inputs(tokens: int = 9, dim: int = 5, vocabulary: int = 11) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    targets = rng.integers(0, vocabulary, size=tokens)
    targets[2:5] = -100
    return rng.normal(size=(tokens, dim)), rng.normal(size=(vocabulary, dim)), targets


def test_reference_is_pytorch() -> None:
    h, w, targets = _inputs()
    loss, dh, dw = get_op("lm_head_loss_grad").reference(
        [h, w, targets, np.array([0.25]), None, None], {"need_dw": True}
    )
    x, y = (torch.tensor(a, requires_grad=True) for a in (h, w))
    want = torch.nn.functional.cross_entropy(x @ y.T, torch.tensor(targets), reduction="sum")
    (0.25 * want).backward()
    np.testing.assert_allclose(loss, [want.item()], atol=1e-12)
    np.testing.assert_allclose(dh, x.grad, atol=1e-12)
    np.testing.assert_allclose(dw, y.grad, atol=1e-12)
    np.testing.assert_allclose(get_op("lm_head_loss").reference([h, w, targets, None], {}), [loss], atol=1e-12)


def test_huge_logits_stay_finite() -> None:
    h, w, targets = _inputs()
    sample = Sample([300 * h, 300 * w, targets, np.array([1.0]), None, None], {"need_dw": True})
    case = make_case(get_op("lm_head_loss_grad"), sample)
    loss, dh, dw = run_native(case)
    want = case.op.reference(case.operands(), case.attrs)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    assert np.isfinite(dh).all() and np.isfinite(dw).all()


def test_nan_shows_and_masked_nan_does_not() -> None:
    h, w, targets = _inputs()
    sample = Sample([h.copy(), w, targets, None], {}, [None, None, None, "f64"])
    sample.inputs[0][0] = np.nan
    assert np.isnan(run_native(make_case(get_op("lm_head_loss"), sample))[0]).all()
    sample.inputs[0] = h.copy()
    sample.inputs[0][2] = np.nan  # a token without a target
    assert np.isfinite(run_native(make_case(get_op("lm_head_loss"), sample))[0]).all()


def test_target_outside_the_vocabulary_is_refused() -> None:
    h, w, targets = _inputs()
    targets[0] = 11
    with pytest.raises(RuntimeError, match="target 11 of token 0 is outside the vocabulary of 11"):
        run_native(make_case(get_op("lm_head_loss"), Sample([h, w, targets, None], {}, [None, None, None, "f64"])))


def test_loss_of_many_chunks_is_the_sum_of_its_tokens() -> None:
    """More tokens than a chunk holds: the loss is that of the tokens one by one."""
    rng = np.random.default_rng(6)
    h, w = rng.normal(size=(1030, 4)), rng.normal(size=(6, 4))
    targets = rng.integers(0, 6, size=1030)
    case = make_case(get_op("lm_head_loss"), Sample([h, w, targets, None], {}, [None, None, None, "f64"]))
    logits = h @ w.T
    want = (np.log(np.exp(logits).sum(-1)) - logits[np.arange(1030), targets]).sum()
    np.testing.assert_allclose(run_native(case)[0], [want], rtol=1e-6)
