"""Our kernels on the GPU beyond the samples of the ops (test_ops.py): rows of every width class, odd and long ones,
windows, results in place, ids that repeat, and the bits of the CPU where they must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from surogate._native import Engine
from surogate.ops import Sample, get_op
from tests.ops.harness import Case, Target, assert_close, make_case, run_native, run_reference, to_storage

LIMITS = {"f32": {"rtol": 1e-4, "atol": 1e-5}, "bf16": {"rtol": 2.0**-7, "atol": 2.0**-7}}


def _case(
    name: str, inputs: list[np.ndarray | None], attrs: dict[str, Any], dtypes: list[str | None], **limits: float
) -> Case:
    return make_case(get_op(name), Sample(inputs, attrs, dtypes, **{**LIMITS["f32"], **limits}))


def _hold(case: Case, target: Target, *, strided: bool | str = False) -> list[np.ndarray | None]:
    """The kernel gives the reference's values, and the same bits eagerly, when captured and when replayed."""
    first = run_native(case, target=target, strided=strided)
    assert_close(case, first, run_reference(case))
    for a, b in zip(first, run_native(case, target=target, strided=strided, runs=3), strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)
    return first


# One width for every way in which a row is shared out, at its upper end, one below, and rows too long to be held.
WIDTHS = [8, 64, 72, 128, 256, 504, 512, 1024, 1040, 2048, 4096, 8192, 8200, 33, 1025]


def _rows(width: int) -> int:
    """Enough that blocks with several rows have some left over, and that a block has several in turn."""
    return 1 + max(3, min(70, 40_000 // width))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_rows_of_every_width(target: Target, width: int, dtype: str) -> None:
    rng = np.random.default_rng(width)
    rows = _rows(width)
    x, r, dy, acc = (rng.normal(size=(rows, width)) for _ in range(4))
    w, acc_dw = rng.normal(size=width), rng.normal(size=width)
    limits = LIMITS[dtype]
    weight = "bf16" if width % 3 else "f32"
    for strided in (False, "bf16" if dtype == "bf16" else True):
        _hold(_case("rmsnorm", [x, w], {"eps": 1e-6}, [dtype, weight], **limits), target, strided=strided)
        case = _case("add_rmsnorm", [x, r, w], {"eps": 1e-6}, [dtype, dtype, weight], **limits)
        _hold(case, target, strided=strided)
    rstd = 1.0 / np.sqrt((x * x).mean(-1) + 1e-6)
    dtypes: list[str | None] = [dtype, dtype, weight, None, dtype, None]
    limits = {"rtol": limits["rtol"], "atol": 4 * limits["atol"] + 1e-5 * rows}
    for need_dx, need_dw, accs in [(True, True, [acc, acc_dw]), (True, False, [None, None]), (False, True, [None] * 2)]:
        attrs = {"need_dx": need_dx, "need_dw": need_dw}
        _hold(_case("rmsnorm_backward", [dy, x, w, rstd, *accs], attrs, dtypes, **limits), target)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("heads,width", [(16, 128), (3, 64), (5, 40), (2, 30)])
def test_norms_and_rotations_of_heads_within_packed_rows(target: Target, heads: int, width: int, dtype: str) -> None:
    """As q and k lie in the result of one product: heads side by side, tokens far apart, results in place."""
    rng = np.random.default_rng(heads)
    tokens = 1100 // heads
    shape = (tokens, heads, width)
    x, dy, w = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=width)
    windows: bool | str = "bf16" if dtype == "bf16" and width % 8 == 0 else True
    limits = LIMITS[dtype]
    norm = _case("rmsnorm", [x, w], {"eps": 1e-6}, [dtype, dtype], **limits)
    angle = rng.uniform(0, 6, size=(tokens, width // 2))
    rope = _case("rope", [x, np.cos(angle), np.sin(angle)], {"inverse": False}, [dtype, None, None], **limits)
    rstd = 1.0 / np.sqrt((x * x).mean(-1) + 1e-6)
    attrs = {"need_dx": True, "need_dw": True}
    dtypes: list[str | None] = [dtype, dtype, dtype, None, None, None]
    loose = {"rtol": limits["rtol"], "atol": 4 * limits["atol"] + 2e-3}
    backward = _case("rmsnorm_backward", [dy, x, w, rstd, None, None], attrs, dtypes, **loose)
    for case in (norm, rope, backward):
        apart = _hold(case, target, strided=windows)
        for a, b in zip(apart, run_native(case, target=target, strided=windows, reuse={0: 0}), strict=True):
            assert a is not None and b is not None and np.array_equal(a, b)


def test_in_place_sums_of_residuals(target: Target) -> None:
    """h and y in the storage of x and r, either way round, for rows that are held and rows that are read again."""
    rng = np.random.default_rng(0)
    for width in (512, 8200, 33):
        x, r = (rng.normal(size=(7, width)) for _ in range(2))
        case = _case("add_rmsnorm", [x, r, rng.normal(size=width)], {"eps": 1e-6}, ["bf16"] * 3, **LIMITS["bf16"])
        apart = run_native(case, target=target)
        for reuse in ({0: 0, 1: 1}, {0: 1, 1: 0}, {0: 0}, {0: 1}, {1: 0}, {1: 1}):
            for a, b in zip(apart, run_native(case, target=target, reuse=reuse), strict=True):
                assert a is not None and b is not None and np.array_equal(a, b), reuse


def _ids(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, int]]:
    zipf = np.minimum(rng.zipf(1.3, size=900), 400) - 1
    yield "as in text", zipf, 401
    yield "one id alone, more often than a block's list is long", np.full(2600, 3), 5
    yield "two ids in turn", np.tile([4, 0], 700), 5
    yield "all different", rng.permutation(300), 300
    hot = rng.integers(0, 50, 1500)
    hot[400:1450] = 7  # padding
    yield "one id in a row", hot, 50
    yield "one token", np.array([2]), 3


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", [24, 264, 33])
def test_gradient_of_a_table_whose_ids_repeat(target: Target, width: int, dtype: str) -> None:
    rng = np.random.default_rng(width)
    for label, ids, rows in _ids(rng):
        dy, acc = rng.normal(size=(len(ids), width)), rng.normal(size=(rows, width))
        for given in (acc, None):
            case = _case(
                "embedding_backward", [dy, ids, given], {"rows": rows}, [dtype, "i32", None], rtol=1e-4, atol=2e-4
            )
            found = _hold(case, target)[0]
            if given is not None:
                untouched = np.setdiff1d(np.arange(rows), ids)
                assert found is not None
                assert np.array_equal(found[untouched], acc[untouched].astype(np.float32)), label
        _hold(_case("embedding", [acc, ids], {"dtype": dtype}, ["bf16", "i32"], **LIMITS[dtype]), target)


def test_ids_outside_the_table_give_nan_and_no_gradient(target: Target) -> None:
    ids = np.array([1, -1, 4, 2])
    table = _case("embedding", [np.ones((4, 16)), ids], {"dtype": "bf16"}, ["bf16", "i32"])
    assert np.isnan(run_native(table, target=target)[0]).all(axis=1).tolist() == [False, True, True, False]
    case = _case("embedding_backward", [np.ones((4, 16)), ids, None], {"rows": 4}, ["bf16", "i32", None])
    (found,) = run_native(case, target=target)
    assert found is not None and found.sum(axis=1).tolist() == [0, 16, 16, 0]


@pytest.mark.parametrize("shape", [(9, 1024), (3, 5, 40), (7, 33), (1021,)], ids=str)
def test_dropout_has_the_masks_of_the_cpu(target: Target, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    for seed in (5, -(2**40) - 7):
        attrs = {"p": 0.3, "salt": 2**33 + 1}
        case = _case("dropout", [rng.normal(size=shape), np.array([seed])], attrs, [None, "i64"])
        (cpu,) = run_native(case)
        for strided in (False, True):
            (found,) = run_native(case, target=target, strided=strided)
            assert found is not None and cpu is not None and np.array_equal(found, cpu)
        bf16 = _case("dropout", [case.sample.inputs[0], np.array([seed])], attrs, ["bf16", "i64"], **LIMITS["bf16"])
        (found,) = _hold(bf16, target, strided="bf16")
        assert found is not None and np.array_equal(found == 0, cpu == 0)


@pytest.mark.parametrize("kept", ["f32", "master", "stochastic"])
@pytest.mark.parametrize("shape", [(4096,), (5, 1001), (2051,)], ids=str)
def test_adamw_rounds_as_the_cpu_does(target: Target, shape: tuple[int, ...], kept: str) -> None:
    rng = np.random.default_rng(2)
    p = rng.normal(size=shape)
    scalars = [np.array([x]) for x in (1e-3, 1 - 0.9**4, 1 - 0.99**4, 0.5)]
    inputs = [
        *(p, rng.normal(size=shape), 0.1 * rng.normal(size=shape), rng.uniform(0.01, 0.1, size=shape), *scalars),
        p + 1e-4 * rng.normal(size=shape) if kept == "master" else None,
        np.array([2**35 + 3]) if kept == "stochastic" else None,
    ]
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "salt": 11}
    dtypes: list[str | None] = ["f32" if kept == "f32" else "bf16", *[None] * 8, "i64"]
    case = _case("adamw", inputs, attrs, dtypes, rtol=2e-5 if kept == "f32" else 2.0**-7)
    cpu = run_native(case)
    for strided in (False, True):
        found = _hold(case, target, strided=strided)
        for a, b in zip(found, cpu, strict=True):
            if a is not None and b is not None:
                np.testing.assert_allclose(a, b, rtol=2.0**-7 if a is found[0] else 2e-6, atol=1e-7)
        # f32 arithmetic may differ in its last bit, which shows in bf16 where that bit decides.
        assert found[0] is not None and cpu[0] is not None
        equal = np.mean(to_storage(found[0], dtypes[0]) == to_storage(cpu[0], dtypes[0]))  # type: ignore[arg-type]
        assert equal > (0.5 if kept == "f32" else 0.995)


@pytest.mark.parametrize("shape", [(1 << 21,), (3 << 20) + 5, (300, 1000), (7, 2, 129)], ids=str)
def test_sums_of_squares(target: Target, shape: Any) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=shape)
    for acc in (None, np.array([12.5])):
        case = _case("sum_squares", [x, acc], {}, [None, "f64"], rtol=2e-7)
        for strided in (False, True):
            _hold(case, target, strided=strided)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 8), (63, 264), (65, 256), (700, 40), (129, 33), (11, 3, 48)], ids=str)
def test_sums_of_rows(target: Target, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(4)
    for acc in (None, rng.normal(size=shape[-1])):
        case = _case("sum_rows", [rng.normal(size=shape), acc], {}, [dtype, None], rtol=1e-4, atol=1e-4)
        for strided in (False, "bf16" if dtype == "bf16" else True):
            _hold(case, target, strided=strided)


def test_fill_and_copy_of_every_dtype(target: Target) -> None:
    rng = np.random.default_rng(5)
    for shape in [(1,), (7,), (4099,), (6, 48), (5, 3, 16), (5, 3, 7)]:
        for dtype in ("f32", "f64", "bf16", "i32", "i64", "u8"):
            x = rng.integers(0, 100, shape) if dtype in ("i32", "i64", "u8") else rng.normal(size=shape)
            for strided in (False, True):
                _hold(_case("fill", [], {"value": 3.0, "shape": shape, "dtype": dtype}, []), target, strided=strided)
                _hold(_case("copy", [x], {}, [dtype]), target, strided=strided)
        for source, result in [("f32", "bf16"), ("bf16", "f32"), ("f64", "f32"), ("f32", "f64"), ("f64", "bf16")]:
            case = _case("copy", [rng.normal(size=shape)], {"dtype": result}, [source], rtol=2.0**-8)
            for strided in (False, True):
                _hold(case, target, strided=strided)


def test_f64_is_rounded_to_bf16_once(target: Target) -> None:
    """Beside a tie, where by way of f32 the tie would be met and rounded to even."""
    below, above = 1 + 2.0**-8 - 2.0**-40, 1 + 2.0**-8 + 2.0**-40
    x = np.array([above, -above, below, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e300, -1e300, np.nan, np.inf, 1e-300, 0.0, -0.0])
    wanted = [1 + 2.0**-7, -1 - 2.0**-7, 1, 1, 1 + 2.0**-6, np.inf, -np.inf, np.nan, np.inf, 0, 0, -0.0]
    case = _case("copy", [x], {"dtype": "bf16"}, ["f64"])
    for strided in (False, True):
        np.testing.assert_array_equal(run_native(case, target=target, strided=strided)[0], wanted)
    for value, rounded in zip(x[:7], wanted[:7], strict=True):
        filled = _case("fill", [], {"value": value, "shape": (3,), "dtype": "bf16"}, [])
        assert (run_native(filled, target=target)[0] == rounded).all()


def test_copies_of_other_shapes_are_refused(arguments: Any) -> None:
    engine = Engine(**arguments())
    engine.allocate("device", 4096)
    ref = lambda offset, *shape: ("device", offset, "f32", shape, (shape[1], 1))  # noqa: E731
    engine.load("p", [("copy", [ref(0, 4, 6)], [ref(1024, 6, 4)], None, {}, "compute", [], -1)], {}, 0)
    with pytest.raises(RuntimeError, match="copy between different shapes"):
        engine.run("p")


def test_values_at_the_ends_of_activations(target: Target) -> None:
    """No NaN where a sigmoid overflows, tails that vanish, and a NaN that stays one."""
    x = np.array([-1e4, -200.0, -88.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.0, 200.0, 1e4])
    for name in ("silu", "gelu", "gelu_tanh", "relu", "tanh"):
        for op, inputs in ((name, [x]), (f"{name}_backward", [np.ones_like(x), x])):
            with np.errstate(over="ignore"):
                _hold(_case(op, inputs, {}, [None] * len(inputs), atol=1e-6), target)
            broken = [np.full(3, np.nan) for _ in inputs]
            case = _case(op, broken, {}, [None] * len(inputs))
            assert np.isnan(run_native(case, target=target)[0]).all(), op
