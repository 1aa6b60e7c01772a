"""What kernels make of operands at the edge: ids outside a table, infinities, NaNs, dimensions of size one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surogate.ops import Sample, get_op
from tests.ops.harness import make_case, run_native, run_reference

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
}


def native(name: str, inputs: list[np.ndarray | None], **attrs: object) -> list[np.ndarray | None]:
    return run_native(make_case(get_op(name), Sample(inputs, attrs)))


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_token_id_outside_the_table(bad: int) -> None:
    ids = np.array([0, 4, bad, 1])
    with pytest.raises(RuntimeError, match=rf"token id {bad} at position 2 .* 5 rows"):
        native("embedding", [np.ones((5, 3)), ids])
    with pytest.raises(RuntimeError, match=rf"token id {bad} at position 2 .* 5 rows"):
        native("embedding_backward", [np.ones((4, 3)), ids, None], rows=5)


@pytest.mark.parametrize("sumsq,max_norm,want", [(np.nan, 1.0, np.nan), (np.inf, 1.0, 0.0), (4.0, 1.0, 0.5)])
def test_clipping_hides_no_broken_norm(sumsq: float, max_norm: float, want: float) -> None:
    sample = Sample([np.array([sumsq])], {"max_norm": max_norm}, dtypes=["f64"])
    norm, scale = run_native(make_case(get_op("clip_scale"), sample))
    np.testing.assert_allclose(norm, np.sqrt([sumsq]))
    np.testing.assert_allclose(scale, [want], rtol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_far_out(name: str) -> None:
    """Beyond the range of an exponential the function and its slope are PyTorch's; NaN stays NaN."""
    x = np.array([0.0, 1e-30, -1e-30, 20, -20, 60, -60, 87.5, -87.5, 88.5, -88.5, 100, -100, 1e4, -1e4, 1e18, -1e18])
    theirs = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    result = ACTIVATIONS[name](theirs)
    result.sum().backward()
    assert theirs.grad is not None
    np.testing.assert_allclose(native(name, [x])[0], result.detach().numpy(), rtol=1e-6, atol=1e-8)
    slope = native(f"{name}_backward", [np.ones_like(x), x])[0]
    np.testing.assert_allclose(slope, theirs.grad.numpy(), rtol=1e-6, atol=1e-8)
    broken = native(name, [np.array([np.nan, 1.0])])[0]
    assert broken is not None and np.isnan(broken[0]) and np.isfinite(broken[1])


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (4, 1), (1, 4), (3, 1, 5), (2, 4, 1), (1, 6, 1), (4, 1, 20_000)])
@pytest.mark.parametrize("strided", [False, True])
def test_dimensions_of_size_one(shape: tuple[int, ...], strided: bool) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=shape), rng.normal(size=shape)
    for name in ("add", "swiglu"):
        case = make_case(get_op(name), Sample([a, b]))
        found, wanted = run_native(case, threads=2, strided=strided), run_reference(case)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    case = make_case(get_op("sum_squares"), Sample([a, None]))
    found = run_native(case, threads=2, strided=strided)
    np.testing.assert_allclose(found[0], run_reference(case)[0], rtol=1e-12)
