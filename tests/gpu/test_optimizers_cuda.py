"""Optimizers on the GPU against the CPU's kernels: states of few bits are the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from surogate.ops import Sample, get_op
from surogate.ops.blockwise8 import BLOCK, dynamic_map, quantize, table
from tests.ops.harness import Case, Target, make_case, run_native, to_storage

ATTRS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "salt": 11}
SCALARS = [np.array([x]) for x in (1e-3, 1 - 0.9**4, 1 - 0.99**4, 0.5)]


def _eight_bit_case(rng: np.random.Generator, blocks: int, kept: str) -> Case:
    n = blocks * BLOCK
    p, g = rng.normal(size=n), rng.normal(size=n) * 10.0 ** rng.integers(-9, 1, size=n)
    g[rng.random(n) < 0.1] = 0.0
    m, absmax_m = quantize(0.1 * g + 0.01 * rng.normal(size=n), dynamic_map(True))
    v, absmax_v = quantize(g * g * rng.random(size=n), dynamic_map(False))
    inputs = [
        *(p, g, m, v, absmax_m.astype(float), absmax_v.astype(float)),
        *(table(True).astype(float), table(False).astype(float), *SCALARS),
        p + 1e-4 * rng.normal(size=n) if kept == "master" else None,
        np.array([2**35 + 3]) if kept == "stochastic" else None,
    ]
    dtype = "f32" if kept == "f32" else "bf16"
    return make_case(get_op("adamw_8bit"), Sample(inputs, ATTRS, [dtype, None, "u8", "u8", *[None] * 9, "i64"]))


@pytest.mark.parametrize("kept", ["f32", "master", "stochastic"])
@pytest.mark.parametrize("blocks", [1, 7, 64, 131])
def test_eight_bit_states_are_those_of_the_cpu(target: Target, blocks: int, kept: str) -> None:
    """Codes and magnitudes bit for bit; weights but for last bits of float32, which show in bf16 where they decide."""
    case = _eight_bit_case(np.random.default_rng(blocks), blocks, kept)
    found, cpu = run_native(case, target=target, runs=3), run_native(case)
    for index in (1, 2, 3, 4, 5):
        assert np.array_equal(found[index], cpu[index]), index  # type: ignore[arg-type]
    assert found[0] is not None and cpu[0] is not None
    np.testing.assert_allclose(found[0], cpu[0], rtol=1e-6 if kept == "f32" else 2.0**-7, atol=1e-7)
    if kept == "master":
        np.testing.assert_allclose(found[6], cpu[6], rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]
    if kept != "f32":
        assert np.mean(to_storage(found[0], "bf16") == to_storage(cpu[0], "bf16")) > 0.99


@pytest.mark.parametrize("kept", ["f32", "master", "stochastic"])
@pytest.mark.parametrize("shape", [(4096,), (5, 1001), (2051,)], ids=str)
def test_bf16_moments_round_as_on_the_cpu(target: Target, shape: tuple[int, ...], kept: str) -> None:
    rng = np.random.default_rng(2)
    p = rng.normal(size=shape)
    inputs = [
        *(p, rng.normal(size=shape), 0.1 * rng.normal(size=shape), rng.uniform(0.01, 0.1, size=shape), *SCALARS),
        p + 1e-4 * rng.normal(size=shape) if kept == "master" else None,
        np.array([2**35 + 3]) if kept == "stochastic" else None,
        np.array([2**35 + 3]),
    ]
    dtype = "f32" if kept == "f32" else "bf16"
    case = make_case(get_op("adamw"), Sample(inputs, ATTRS, [dtype, None, "bf16", "bf16", *[None] * 5, "i64", "i64"]))
    cpu = run_native(case)
    for strided in (False, True):
        found = run_native(case, target=target, strided=strided, runs=3)
        for index in (2, 3):
            a, b = found[index], cpu[index]
            assert a is not None and b is not None
            np.testing.assert_allclose(a, b, rtol=2.0**-7)
            assert np.mean(to_storage(a, "bf16") == to_storage(b, "bf16")) > 0.995
