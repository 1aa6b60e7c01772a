"""The CUDA backend itself: memory, graphs against eager runs, streams and events, what goes wrong and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from surogate import cuda
from surogate._native import Engine

Arguments = Callable[..., dict[str, Any]]
Ref = tuple[str, int, str, tuple[int, ...], tuple[int, ...]]


def ref(offset: int, *shape: int, dtype: str = "f32", space: str = "device") -> Ref:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return (space, offset, dtype, shape, strides)


def matmul(a: Ref, b: Ref, y: Ref, c: Ref | None = None, *, work: Ref, stream: str = "compute", **more: Any) -> Any:
    attrs = {"ta": False, "tb": False, "alpha": 1.0}
    return ("matmul", [a, b, None, c], [y], work, attrs, stream, more.get("waits", []), more.get("signal", -1))


WORK = ref(1 << 20, (32 << 20) + 256, dtype="u8")
TOP = (1 << 20) + (32 << 20) + 256


def filled(arguments: dict[str, Any], arrays: dict[int, np.ndarray], top: int = TOP) -> Engine:
    engine = Engine(**arguments)
    engine.allocate("device", top)
    for offset, array in arrays.items():
        engine.write("device", offset, array)
    return engine


def floats(engine: Engine, offset: int, *shape: int) -> np.ndarray:
    n = int(np.prod(shape))
    return engine.read("device", offset, 4 * n).view(np.float32).reshape(shape)


def test_memory_is_zero_and_keeps_what_is_written(arguments: Arguments) -> None:
    """Sizes around those of the staging memory, at odd offsets."""
    n = (40 << 20) + 123
    engine = Engine(**arguments())
    engine.allocate("device", n)
    assert not engine.read("device", 0, n).any()
    rng = np.random.default_rng(0)
    want = np.zeros(n, np.uint8)
    for offset, size in [(0, 1), (7, 4 << 20), (5 << 20, (16 << 20) + 5), (n - 3, 3), (1 << 20, 8 << 20), (100, 0)]:
        want[offset : offset + size] = data = rng.integers(0, 256, size, np.uint8)
        engine.write("device", offset, data)
        data[:] = 0  # the engine has taken it over
    assert np.array_equal(engine.read("device", 0, n), want)
    assert np.array_equal(engine.read("device", 12345, 8 << 20), want[12345 : 12345 + (8 << 20)])
    with pytest.raises(ValueError, match="outside"):
        engine.read("device", n - 1, 2)
    with pytest.raises(ValueError, match="read and write"):
        engine.memory("device", 0, 1)


def test_pinned_memory_is_the_hosts(arguments: Arguments) -> None:
    engine = Engine(**arguments())
    for space in ("pinned", "host"):
        engine.allocate(space, 1000)
        assert not engine.memory(space, 0, 1000).any()
        engine.memory(space, 8, 4)[:] = [1, 2, 3, 4]
        assert list(engine.read(space, 8, 4)) == [1, 2, 3, 4]
    assert engine.allocated() == {"pinned": 1000, "host": 1000}


def test_the_plan_is_what_is_taken(arguments: Arguments) -> None:
    """Memory that CUDA gives out in pieces of 2 MB, and no more than that."""
    engine = Engine(**arguments())
    before, _ = cuda.memory(0)
    engine.allocate("device", 1 << 30)
    taken = before - cuda.memory(0)[0]
    assert 1 << 30 <= taken <= (1 << 30) + (2 << 20)


def test_too_much_memory_is_told_with_numbers(arguments: Arguments, gpu: cuda.Gpu) -> None:
    with pytest.raises(RuntimeError, match=rf"bytes free.*{2 * gpu.memory} cannot be allocated"):
        Engine(**arguments()).allocate("device", 2 * gpu.memory)


@pytest.mark.parametrize("options", [{}, {"eager": True}, {"check_nan": True}], ids=["graph", "eager", "check"])
def test_every_way_of_running_gives_the_same_bits(arguments: Arguments, options: dict[str, bool]) -> None:
    """A product that accumulates, so that every run must happen exactly once."""
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
    y = ref(65536, 64, 64)
    program = [
        matmul(ref(0, 64, 64), ref(16384, 64, 64), ref(32768, 64, 64), work=WORK),
        matmul(ref(32768, 64, 64), ref(16384, 64, 64), y, y, work=WORK),
    ]
    found = []
    for way in ({"eager": True}, options):
        engine = filled(arguments(tune=False, **way), {0: a, 16384: b})
        engine.load("p", program, {}, 0)
        seen = []
        for _ in range(4):
            engine.run("p")
            seen.append(floats(engine, 65536, 64, 64))
        found.append(seen)
    assert np.array_equal(found[0], found[1])
    want = a.astype(np.float64) @ b @ b
    for count, y_found in enumerate(found[1], 1):
        np.testing.assert_allclose(y_found, count * want, rtol=1e-4, atol=1e-3)


def test_streams_wait_for_events(arguments: Arguments) -> None:
    """A chain over three streams, whose links are delayed: without the waits, results would be stale."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(32, 32)).astype(np.float32)
    half = (0.5 * np.eye(32)).astype(np.float32)
    refs = [ref(8192 * (i + 1), 32, 32) for i in range(4)]
    at_half = ref(0, 32, 32)
    work = [ref((1 << 20) + i * (33 << 20), (32 << 20) + 256, dtype="u8") for i in range(3)]
    program = [
        matmul(refs[0], at_half, refs[1], work=work[0], stream="h2d", signal=0),
        matmul(refs[1], at_half, refs[2], work=work[1], waits=[0], signal=1),
        matmul(refs[2], at_half, refs[3], work=work[2], stream="comm", waits=[1]),
    ]
    engine = filled(arguments(tune=False), {0: half}, (1 << 20) + (99 << 20) + 256)
    engine.load("p", program, {}, 2)
    for delay in (0, 2000):
        engine.inject_delays(3, delay)
        for run in range(3):
            engine.write("device", 8192, x + run)
            engine.run("p")
            np.testing.assert_array_equal(floats(engine, 4 * 8192, 32, 32), (x + run) / 8)


def test_a_nan_is_found_where_it_arises(arguments: Arguments) -> None:
    a = np.ones((16, 16), np.float32)
    b = a.copy()
    b[3, 5] = np.nan
    program = [
        matmul(ref(0, 16, 16), ref(0, 16, 16), ref(8192, 16, 16), work=WORK),
        matmul(ref(0, 16, 16), ref(4096, 16, 16), ref(12288, 16, 16), work=WORK),
    ]
    engine = filled(arguments(check_nan=True), {0: a, 4096: b})
    engine.load("p", program, {}, 0)
    with pytest.raises(RuntimeError, match=r"p, instruction 1 \(matmul\): result 0 has a NaN"):
        engine.run("p")
    engine.write("device", 4096, a)
    engine.run("p")


def test_errors_name_program_instruction_and_op(arguments: Arguments) -> None:
    engine = filled(arguments(), {})
    engine.load("p", [matmul(ref(0, 8, 8), ref(0, 8, 8, dtype="bf16"), ref(512, 8, 8), work=WORK)], {}, 0)
    with pytest.raises(RuntimeError, match=r"p, instruction 0 \(matmul\): a product of two dtypes"):
        engine.run("p")
    with pytest.raises(ValueError, match="no such kernel"):
        engine.load("q", [("no_such_op", [], [], None, {}, "compute", [], -1)], {}, 0)
    with pytest.raises(RuntimeError, match="there is no GPU 99"):
        Engine(**{**arguments(), "device": 99})


def test_profile_counts_every_instruction(arguments: Arguments) -> None:
    n = 512
    work = ref(4 << 20, (32 << 20) + 256, dtype="u8")
    program = [matmul(ref(0, n, n), ref(0, n, n), ref(4 * n * n * (i + 1), n, n), work=work) for i in range(2)]
    engine = filled(arguments(tune=False), {0: np.ones((n, n), np.float32)}, (4 << 20) + (32 << 20) + 256)
    engine.load("p", program, {}, 0)
    engine.run("p")
    engine.profile(True)
    for _ in range(3):
        engine.run("p")
    engine.profile(False)
    engine.run("p")
    report = engine.profile_report()
    assert [(row[0], row[1], row[2], row[3]) for row in report] == [("p", i, "matmul", 3) for i in range(2)]
    assert all(1e-6 < row[4] / row[3] < 1e-3 for row in report)  # some microseconds each
    assert (floats(engine, 4 * n * n, n, n) == n).all()


def test_algorithms_are_kept_and_read_again(arguments: Arguments, tmp_path: Any) -> None:
    rng = np.random.default_rng(4)
    a = rng.normal(size=(128, 128)).astype(np.float32)
    program = [matmul(ref(0, 128, 128), ref(0, 128, 128), ref(65536, 128, 128), work=WORK)]

    def once() -> np.ndarray:
        engine = filled(arguments(cache_dir=tmp_path), {0: a})
        engine.load("p", program, {}, 0)
        engine.run("p")
        return floats(engine, 65536, 128, 128)

    first = once()
    (file,) = tmp_path.glob("cublaslt-*.tsv")
    lines = file.read_text().splitlines()
    assert len(lines) == 1 and "128x128x128" in lines[0]
    assert np.array_equal(once(), first)
    assert file.read_text().splitlines() == lines  # found, not measured again
    file.write_text("torn line\tabc\n" + lines[0][:50])
    np.testing.assert_allclose(once(), a.astype(np.float64) @ a, rtol=1e-4, atol=1e-3)
