"""Packed attention on the GPU against its reference: cuDNN in bf16, the plain kernels in f32 and for odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

from surogate.ops import Sample, get_op
from tests.ops.harness import Target, assert_close, make_case, run_native, run_reference

# Boundaries, heads, key heads, head_dim, window: what a bf16 model can have.
CASES = [
    ([0, 130], 2, 2, 64, 0),
    ([0, 64, 65, 193, 333, 333, 333], 4, 2, 64, 0),
    ([0, 1, 2, 40, 200], 8, 1, 128, 0),
    ([0, 300, 420, 420], 4, 4, 128, 100),
    ([0, 90, 170], 6, 2, 32, 1),
    ([0, 257], 2, 1, 80, 64),
    ([0, 96, 224], 3, 1, 256, 0),
]


def _forward(case: tuple[list[int], int, int, int, int], dtype: str, **attrs: object) -> Sample:
    boundaries, heads, kv_heads, dim, window = case
    rng = np.random.default_rng(sum(boundaries) + dim)
    q, k, v = (rng.normal(size=(boundaries[-1], h, dim)) for h in (heads, kv_heads, kv_heads))
    limits = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bf16" else {"rtol": 2e-5, "atol": 2e-5}
    cu = np.array(boundaries)
    scale = {"scale": dim**-0.5, "window": window}
    return Sample([q, k, v, cu], {**scale, **attrs}, [dtype] * 3 + [None], **limits)


def _tokens_first(lse: np.ndarray | None) -> np.ndarray:
    """cuDNN's [T,H] in the memory of [H,T], as [H,T]."""
    assert lse is not None
    return lse.reshape(lse.shape[::-1]).T


def _backward(sample: Sample, dtype: str, packed: bool) -> Sample:
    """A sample of the backward pass, with o and lse as the forward pass on the GPU lays them out."""
    case = make_case(get_op("attention"), sample)
    o, lse = run_reference(case)
    assert o is not None and lse is not None
    do = np.random.default_rng(1).normal(size=o.shape)
    lse = np.ascontiguousarray(lse.T).reshape(lse.shape) if packed else lse
    q, k, v, cu = case.operands()
    limits = {"rtol": 2e-2, "atol": 3e-2} if dtype == "bf16" else {"rtol": 1e-4, "atol": 5e-5}
    dtypes: list[str | None] = [dtype] * 5 + [None, None]
    return Sample([do, q, k, v, o, lse, cu], sample.attrs, dtypes, **limits)


def _backward_reference(sample: Sample, packed: bool) -> list[np.ndarray | None]:
    case = make_case(get_op("attention_backward"), sample)
    operands = case.operands()
    if packed:
        operands[5] = _tokens_first(operands[5])
    return case.op.reference(operands, case.attrs)


@pytest.mark.parametrize("strided", [False, "bf16"], ids=["dense", "windows"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_attention(target: Target, case: tuple[list[int], int, int, int, int], strided: bool | str) -> None:
    forward = make_case(get_op("attention"), _forward(case, "bf16"))
    o, lse = run_native(forward, target=target, strided=strided, runs=3)
    assert_close(forward, [o, _tokens_first(lse)], run_reference(forward))

    sample = _backward(_forward(case, "bf16"), "bf16", packed=True)
    backward = make_case(get_op("attention_backward"), sample)
    found = run_native(backward, target=target, strided=strided, runs=3)
    assert_close(backward, found, _backward_reference(sample, packed=True))


def test_the_result_may_take_the_storage_of_q(target: Target) -> None:
    for case in CASES[:4]:
        forward = make_case(get_op("attention"), _forward(case, "bf16"))
        o, reused = run_native(forward, target=target)[0], run_native(forward, target=target, reuse={0: 0})[0]
        assert o is not None and reused is not None and np.array_equal(o, reused)


def test_a_stated_length_changes_nothing(target: Target) -> None:
    case = CASES[1]
    plain = make_case(get_op("attention"), _forward(case, "bf16"))
    stated = make_case(get_op("attention"), _forward(case, "bf16", max_length=140))
    for a, b in zip(run_native(plain, target=target), run_native(stated, target=target), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


def test_the_deterministic_backward_pass_repeats_its_bits(target: Target) -> None:
    if target.sm // 10 in (8, 12):
        pytest.skip("cuDNN has none for packed tokens on this architecture")
    sample = _backward(_forward(([0, 500, 900], 8, 2, 64, 0), "bf16", deterministic=True), "bf16", packed=True)
    case = make_case(get_op("attention_backward"), sample)
    first = run_native(case, target=target)
    assert_close(case, first, _backward_reference(sample, packed=True))
    for a, b in zip(first, run_native(case, target=target, runs=3), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "windows"])
def test_plain_attention(target: Target, strided: bool) -> None:
    for name in ("attention", "attention_backward"):
        for sample in get_op(name).samples(np.random.default_rng(2)):
            case = make_case(get_op(name), sample)
            assert_close(case, run_native(case, target=target, strided=strided, runs=3), run_reference(case))
