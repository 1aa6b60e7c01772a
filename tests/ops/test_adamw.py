"""AdamW against PyTorch's, and the two ways in which bf16 parameters are kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from surogate.ops import Sample, get_op
from tests.ops.harness import Case, from_storage, make_case, run_native, run_reference, to_storage

Runner = Callable[[Case], list[np.ndarray | None]]
ATTRS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "salt": 17}

every_runner = pytest.mark.parametrize("run", [run_reference, run_native])


def update(
    run: Runner,
    state: list[np.ndarray | None],
    *,
    lr: float,
    step: int = 1,
    scale: float = 1.0,
    dtype: str = "f32",
    seed: int | None = None,
    attrs: dict[str, float] = ATTRS,
) -> list[np.ndarray | None]:
    """One update; ``state`` and the result are p, g, m, v, master."""
    p, g, m, v, master = state
    scalars = [lr, 1 - attrs["beta1"] ** step, 1 - attrs["beta2"] ** step, scale]
    sample = Sample(
        [p, g, m, v, *(np.array([s]) for s in scalars), master, None if seed is None else np.array([seed])],
        dict(attrs),
        dtypes=[dtype, *[None] * 8, "i64"],
    )
    return run(make_case(get_op("adamw"), sample))


@every_runner
def test_follows_torch(run: Runner) -> None:
    """Twenty steps with a changing rate and clipped gradients end where torch.optim.AdamW ends."""
    rng = np.random.default_rng(3)
    start = rng.normal(size=(13, 9))
    theirs = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = torch.optim.AdamW([theirs], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = [start, None, np.zeros_like(start), np.zeros_like(start), None]
    for step in range(1, 21):
        gradient, scale, lr = rng.normal(size=start.shape), float(rng.uniform(0.1, 1)), 1e-2 / step
        state[1] = gradient
        state = update(run, state, lr=lr, step=step, scale=scale)
        assert not state[1].any()
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = torch.tensor(gradient * scale, dtype=torch.float32)
        optimizer.step()
    np.testing.assert_allclose(state[0], theirs.detach().numpy(), rtol=2e-6, atol=2e-6)
    moments = optimizer.state[theirs]
    np.testing.assert_allclose(state[2], moments["exp_avg"].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[3], moments["exp_avg_sq"].numpy(), rtol=1e-5, atol=1e-6)


@every_runner
def test_master_is_precise_and_parameter_its_rounding(run: Runner) -> None:
    """Updates far below a bf16 step are not lost: the master is that of an f32 parameter, p its nearest bf16."""
    rng = np.random.default_rng(4)
    start = rng.normal(size=(7, 11)).astype(np.float32).astype(np.float64)
    zero = np.zeros_like(start)
    rounded = from_storage(to_storage(start, "bf16"), "bf16")
    narrow, wide = [rounded, None, zero, zero, start], [start, None, zero, zero, None]
    for step in range(1, 6):
        narrow[1] = wide[1] = rng.normal(size=start.shape)
        narrow = update(run, narrow, lr=1e-5, step=step, dtype="bf16")
        wide = update(run, wide, lr=1e-5, step=step)
    assert np.array_equal(narrow[4], wide[0])
    nearest = torch.tensor(wide[0]).float().bfloat16().double().numpy()
    assert np.array_equal(narrow[0], nearest)


@every_runner
def test_stochastic_rounding_is_unbiased(run: Runner) -> None:
    """Weight decay of 0.3 bf16 steps: values stay or move by one step, and the mean over seeds moves by 0.3 steps."""
    step = 2.0**-8  # between bf16 numbers below 1
    ones, zero = np.ones(997), np.zeros(997)
    decay = {**ATTRS, "weight_decay": 0.3 * step}
    results = []
    for seed in range(40):
        p = update(run, [ones, zero, zero, zero, None], lr=1.0, dtype="bf16", seed=seed, attrs=decay)[0]
        assert set(np.unique(p)) == {1.0 - step, 1.0}
        results.append((1.0 - p) / step)
    moved = np.stack(results)
    assert abs(moved.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / moved.size)
    # Neither an element nor a seed is special: rates by row and by column scatter as independent draws do.
    for axis in (0, 1):
        rates = moved.mean(axis)
        draws = moved.shape[axis]
        assert abs(rates.var() / (0.3 * 0.7 / draws) - 1) < 5 * np.sqrt(2 / rates.size)


@every_runner
def test_stochastic_rounding_keeps_what_bf16_holds(run: Runner) -> None:
    """A parameter that does not change is not disturbed."""
    p = from_storage(to_storage(np.random.default_rng(5).normal(size=300), "bf16"), "bf16")
    zero = np.zeros_like(p)
    assert np.array_equal(update(run, [p, zero, zero, zero, None], lr=0.0, dtype="bf16", seed=1)[0], p)


def test_broken_gradients_show() -> None:
    """A gradient that is not a number makes the parameter one too, in every way of keeping it."""
    for dtype, seed, with_master in [("f32", None, False), ("bf16", 1, False), ("bf16", None, True)]:
        ones = np.ones(9)
        gradient = np.array([np.nan, np.inf, *[1.0] * 7])
        master = ones if with_master else None
        p = update(run_native, [ones, gradient, 0 * ones, 0 * ones, master], lr=1e-2, dtype=dtype, seed=seed)[0]
        assert np.isnan(p[:2]).all() and np.isfinite(p[2:]).all()
