"""fill and copy: layouts, dtypes and rounding, against NumPy and against a search among all bf16 values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from surogate import _native

NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u8": np.uint8, "bf16": np.uint16}
HALF = 1 << 17  # bytes: x lies in the first half of the arena, y in the second


def run(op: str, x: tuple | None, y: tuple, data: np.ndarray | None = None, attrs: dict | None = None) -> np.ndarray:
    """Run one instruction over references (dtype, shape, strides); all of y's half of the arena, which began as zeros,
    in y's dtype. ``data``: what lies at x, element by element of its storage."""
    e = _native.Engine("cpu", 2)
    e.allocate("device", 2 * HALF)
    if data is not None:
        e.memory("device", 0, HALF)[: data.nbytes] = data.reshape(-1).view(np.uint8)
    inputs = [] if x is None else [("device", 0, *x)]
    e.load("p", [(op, inputs, [("device", HALF, *y)], None, attrs or {}, "compute", [], -1)], {}, 0)
    e.run("p")
    return e.read("device", HALF, HALF).view(NUMPY[y[0]])


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


@st.composite
def layouts(draw):
    """A shape, and strides that leave gaps between its rows."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size = size * n + (draw(st.integers(0, 3)) if strides else 0)
    return shape, tuple(reversed(strides))


@given(layouts(), st.sampled_from(sorted(NUMPY)), st.data())
@settings(deadline=None, max_examples=80)
def test_copy_between_layouts(layout, dtype: str, data) -> None:
    """Every element arrives, and nothing is written between the rows."""
    shape, strides = layout
    kind = NUMPY[dtype]
    values = np.arange(1, 1 + int(np.prod(shape))).astype(kind).reshape(shape)
    size = np.dtype(kind).itemsize
    expected = np.zeros(HALF // size, kind)
    view = np.lib.stride_tricks.as_strided(expected, shape, [s * size for s in strides])
    view[...] = values
    assert (run("copy", (dtype, shape, dense(shape)), (dtype, shape, strides), values) == expected).all()
    back = run("copy", (dtype, shape, strides), (dtype, shape, dense(shape)), expected)
    assert (back[: values.size].reshape(shape) == values).all() and not back[values.size :].any()


with np.errstate(invalid="ignore"):  # of signalling NaNs
    BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
FINITE = np.flatnonzero(np.isfinite(BF16) & ((BF16 != 0) | (np.arange(1 << 16) == 0)))
FINITE = FINITE[np.argsort(BF16[FINITE])]
SORTED = BF16[FINITE]


def nearest_bf16(x: float) -> float:
    """The bf16 value nearest to a float64, the one with even bits at a tie: by search in the list of all."""
    largest = SORTED[-1]
    if not abs(x) < largest + (largest - SORTED[-2]) / 2:  # IEEE 754: half a step beyond the largest is infinity
        return np.copysign(np.inf, x)
    at = int(np.clip(np.searchsorted(SORTED, x), 1, len(SORTED) - 1))
    low, high = SORTED[at - 1], SORTED[at]
    if x - low != high - x:
        return low if x - low < high - x else high
    return low if FINITE[at - 1] % 2 == 0 else high


TIES = [
    1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, -1 - 2.0**-8 - 2.0**-50,
    2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-134 + 2.0**-170, 2.0**-149, 2.0**-150, 3.3895e38, 3.3961e38, 3.397e38,
]  # fmt: skip


@pytest.mark.parametrize("source", ["f32", "f64"])
def test_narrowing_to_bf16(source: str) -> None:
    rng = np.random.default_rng(0)
    spread = rng.normal(size=400) * 2.0 ** rng.integers(-126, 126, 400)
    # Halfway between neighbours, and as little beside it as a float64 can say.
    at = rng.integers(1, len(SORTED) - 1, 100)
    half = (SORTED[at] + SORTED[at + 1]) / 2
    values = np.concatenate([TIES, spread, half, np.nextafter(half, np.inf), np.nextafter(half, -np.inf)])
    values = values.astype(NUMPY[source])
    n = len(values)
    bits = run("copy", (source, (n,), (1,)), ("bf16", (n,), (1,)), values)[:n]
    expected = [nearest_bf16(float(v)) for v in values]
    assert BF16[bits].tolist() == expected
    for i in (4, 9) if source == "f64" else ():  # what rounding twice would get wrong
        assert BF16[bits[i]] != nearest_bf16(float(np.float32(values[i]))), values[i]


@pytest.mark.parametrize("target", ["f32", "f64"])
def test_widening_from_bf16_is_exact(target: str) -> None:
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    found = run("copy", ("bf16", bits.shape, (1,)), (target, bits.shape, (1,)), bits)[: len(bits)]
    expected = BF16[bits].astype(NUMPY[target])
    assert np.array_equal(found, expected, equal_nan=True)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()


@given(hnp.arrays(np.float64, 33, elements=st.floats(width=64)))
@settings(deadline=None, max_examples=30)
def test_f64_and_f32(values: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    narrow = run("copy", ("f64", (33,), (1,)), ("f32", (33,), (1,)), values)[:33]
    assert np.array_equal(narrow, expected, equal_nan=True)
    wide = run("copy", ("f32", (33,), (1,)), ("f64", (33,), (1,)), expected)[:33]
    assert np.array_equal(wide, expected.astype(np.float64), equal_nan=True)


def test_a_nan_stays_one() -> None:
    for source, values in (("f32", np.array([np.nan], np.float32)), ("f64", np.array([np.nan]))):
        assert np.isnan(BF16[run("copy", (source, (1,), (1,)), ("bf16", (1,), (1,)), values)[0]])
    # Payload in the low half only: cutting it off would leave an infinity.
    low = np.array([0x7F800001, 0xFF80FFFF], np.uint32)
    assert np.isnan(BF16[run("copy", ("f32", (2,), (1,)), ("bf16", (2,), (1,)), low)[:2]]).all()


@pytest.mark.parametrize(("dtype", "value"), [("f32", -1.5), ("f64", 0.1), ("i32", -7), ("i64", 2**40), ("u8", 200)])
def test_fill_touches_its_elements_alone(dtype: str, value: float) -> None:
    found = run("fill", None, (dtype, (3, 4), (9, 1)), attrs={"value": value})
    expected = np.zeros_like(found)
    expected[:27].reshape(3, 9)[:, :4] = value
    assert (found == expected).all()


@pytest.mark.parametrize("value", [0.1, 1 + 2.0**-8 + 2.0**-40, -3.0])
def test_fill_of_bf16_rounds_once(value: float) -> None:
    assert BF16[run("fill", None, ("bf16", (5,), (1,)), attrs={"value": value})[4]] == nearest_bf16(value)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (("f32", (2, 6), (6, 1)), ("f32", (6, 2), (2, 1)), "different shapes"),
        (("f32", (6,), (1,)), ("f32", (6, 1), (1, 1)), "different shapes"),
        (("f32", (6,), (1,)), ("i32", (6,), (1,)), "floating dtypes only"),
        (("i64", (6,), (1,)), ("i32", (6,), (1,)), "floating dtypes only"),
    ],
)
def test_copy_refuses(x, y, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        run("copy", x, y)
