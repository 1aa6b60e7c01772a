"""Matrix products and the LM head's loss on the GPU against their references, in both dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from surogate.ops import Sample, get_op
from tests.ops.harness import Target, assert_close, make_case, run_native, run_reference

EPS = 2.0**-8  # of bf16


def _matmul(rng: np.random.Generator, m: int, n: int, k: int, **options: bool) -> tuple[list[np.ndarray | None], dict]:
    ta, tb = options.get("ta", False), options.get("tb", False)
    inputs = [
        rng.normal(size=(k, m) if ta else (m, k)),
        rng.normal(size=(n, k) if tb else (k, n)),
        rng.normal(size=n) if options.get("bias") else None,
        rng.normal(size=(m, n)) if options.get("c") else None,
    ]
    return inputs, {"ta": ta, "tb": tb, "alpha": 0.5 if options.get("scaled") else 1.0}


def _products() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for m, n, k in [(128, 256, 64), (200, 72, 136), (16, 1024, 512), (512, 16, 1024), (8, 8, 8), (1, 64, 128)]:
        for ta in (False, True):
            for tb in (False, True):
                for bias, c in ((False, False), (True, False), (False, True)):
                    inputs, attrs = _matmul(rng, m, n, k, ta=ta, tb=tb, bias=bias, c=c, scaled=c)
                    # Sums are f32; the library may round to bf16 once before it adds bias or c, and once after.
                    yield Sample(inputs, attrs, ["bf16"] * 4, rtol=2 * EPS, atol=2e-3 * np.sqrt(k))
                    if not bias:
                        attrs = {**attrs, "dtype": "f32"}
                        yield Sample(inputs, attrs, ["bf16", "bf16", None, "f32"], rtol=1e-5, atol=1e-4 * np.sqrt(k))


@pytest.mark.parametrize("strided", [False, "bf16"], ids=["dense", "windows"])
def test_bf16_products(target: Target, strided: bool | str) -> None:
    for sample in _products():
        case = make_case(get_op("matmul"), sample)
        assert_close(case, run_native(case, target=target, strided=strided, runs=3), run_reference(case))


def test_f32_products(target: Target) -> None:
    for sample in get_op("matmul").samples(np.random.default_rng(1)):
        if sample.dtypes is None:
            case = make_case(get_op("matmul"), sample)
            for strided in (False, True):
                assert_close(case, run_native(case, target=target, strided=strided), run_reference(case))


def _losses(dtype: str) -> Iterator[tuple[str, Sample]]:
    rng = np.random.default_rng(2)
    loose = dtype == "bf16"
    for tokens, dim, vocabulary, share, acc in [
        (7, 8, 16, 0.7, True),
        (64, 64, 1000, 1.0, False),
        (300, 40, 1304, 0.6, True),
        (96, 64, 1001, 0.5, True),  # a vocabulary that ends within sixteen bytes
        (50, 16, 30, 0.0, True),
    ]:
        h, w = rng.normal(size=(tokens, dim)), rng.normal(size=(vocabulary, dim)) / np.sqrt(dim)
        targets = rng.integers(0, vocabulary, size=tokens)
        targets[rng.random(tokens) >= share] = -100
        acc_loss = rng.normal(size=1) if acc else None
        acc_dw = rng.normal(size=w.shape) if acc else None
        # Logits of size 3 are rounded to 2^-7 in bf16; a loss is the sum of many such, of either sign.
        limits = {"rtol": 2e-3, "atol": 2e-2} if loose else {"rtol": 2e-5, "atol": 2e-5}
        yield "lm_head_loss", Sample([h, w, targets, acc_loss], {}, [dtype, dtype, None, "f64"], **limits)
        for need_dw in (True, False):
            inputs = [h, w, targets, np.array([0.3]), acc_loss, acc_dw if need_dw else None]
            dtypes: list[str | None] = [dtype, dtype, None, None, "f64", None]
            yield "lm_head_loss_grad", Sample(inputs, {"need_dw": need_dw}, dtypes, **limits)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_losses(target: Target, dtype: str) -> None:
    for name, sample in _losses(dtype):
        case = make_case(get_op(name), sample)
        reuse = {1: 0} if name == "lm_head_loss_grad" else None
        found, wanted = run_native(case, target=target, runs=3), run_reference(case)
        assert_close(case, found, wanted)
        # dh in the storage of h: the same bits.
        if reuse:
            for a, b in zip(found, run_native(case, target=target, reuse=reuse), strict=True):
                assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))


def test_chunks_of_tokens_give_what_one_chunk_gives(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    h, w = rng.normal(size=(700, 64)), rng.normal(size=(520, 64)) / 8
    inputs = [h, w, rng.integers(0, 520, size=700), np.array([1.0]), np.zeros(1), np.zeros(w.shape)]
    dtypes: list[str | None] = ["bf16", "bf16", None, None, "f64", None]
    case = make_case(get_op("lm_head_loss_grad"), Sample(inputs, {"need_dw": True}, dtypes, rtol=1e-5, atol=1e-4))
    whole = run_native(case, target=target)
    monkeypatch.setattr("surogate.ops.lm_head_loss._CUDA_CHUNK", 0)  # the smallest: 128 tokens
    parts = run_native(case, target=target, runs=3)
    assert_close(case, parts, whole)


def test_a_target_beyond_the_vocabulary_makes_the_loss_nan(target: Target) -> None:
    inputs = [np.ones((4, 8)), np.ones((16, 8)), np.array([0, 16, -100, 3]), None]
    case = make_case(get_op("lm_head_loss"), Sample(inputs, {}, ["bf16", "bf16", None, "f64"]))
    assert np.isnan(run_native(case, target=target)[0]).all()


def test_timed_algorithms_are_right_and_leave_sums_alone(target: Target, arguments: object) -> None:
    """Timing runs a product many times: one that accumulates must add its result once."""
    timed = replace(target, arguments=arguments(tune=True))  # type: ignore[operator]
    rng = np.random.default_rng(5)
    inputs, attrs = _matmul(rng, 256, 128, 512, ta=True, c=True)
    sample = Sample(inputs, {**attrs, "dtype": "f32"}, ["bf16", "bf16", None, "f32"], rtol=1e-5, atol=1e-3)
    case = make_case(get_op("matmul"), sample)
    assert_close(case, run_native(case, target=timed, runs=3), run_reference(case))
