"""The executor: streams, events, arenas, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from surogate import _native

N = 4096  # bytes of a test tensor, as 1024 floats


def engine(threads: int = 2) -> _native.Engine:
    e = _native.Engine("cpu", threads)
    e.allocate("device", 64 * N)
    e.allocate("host", 8 * N)
    return e


def ref(slot: int, space: str = "device", n: int = N // 4):
    return (space, slot * N, "f32", (n,), (1,))


def op(name: str, inputs, outputs, attrs=None, stream="compute", waits=(), signal=-1):
    return (name, inputs, outputs, None, attrs or {}, stream, list(waits), signal)


def floats(e: _native.Engine, slot: int, space: str = "device") -> np.ndarray:
    return e.memory(space, slot * N, N).view(np.float32)


def pipeline(drop: set[int] = frozenset()) -> list[tuple]:
    """A streamed weight: copied in on one stream, used on compute, sent back on a third, twice through one buffer.

    ``drop``: numbers of waits to leave out.
    """
    waits = [0, 1, 2, 3, 4]

    def wait(i: int) -> list[int]:
        return [] if i in drop else [waits[i]]

    return [
        op("copy", [ref(0, "host")], [ref(0)], stream="h2d", signal=0),
        op("add", [ref(0), ref(1)], [ref(2)], waits=wait(0), signal=1),
        op("copy", [ref(2)], [ref(2, "host")], stream="d2h", waits=wait(1), signal=2),
        op("copy", [ref(1, "host")], [ref(0)], stream="h2d", waits=wait(1), signal=3),  # the buffer again
        op("add", [ref(0), ref(1)], [ref(2)], waits=[*wait(3), *wait(2)], signal=4),
        op("copy", [ref(2)], [ref(3, "host")], stream="d2h", waits=wait(4)),
    ]


def outcome(instructions: list[tuple], seed: int) -> tuple[float, float]:
    e = engine()
    floats(e, 0, "host")[:], floats(e, 1, "host")[:], floats(e, 1)[:] = 3, 5, 10
    e.inject_delays(seed, 2000)
    e.load("p", instructions, {}, 5)
    e.run("p")
    first, second = floats(e, 2, "host"), floats(e, 3, "host")
    return float(first.min()), float(second.max())


@pytest.mark.parametrize("seed", range(12))
def test_streams_under_delays(seed: int) -> None:
    assert outcome(pipeline(), seed) == (13.0, 15.0)


@pytest.mark.parametrize("dropped", [0, 1, 2, 3, 4])
def test_a_missing_dependency_is_found(dropped: int) -> None:
    """Mutation: every wait of the program matters, and delays on some seed show it."""
    assert any(outcome(pipeline({dropped}), seed) != (13.0, 15.0) for seed in range(40))


def test_a_failing_kernel_names_program_instruction_and_op() -> None:
    for stream in ("compute", "h2d"):
        e = engine()
        bad = op("copy", [ref(0, n=8)], [ref(1, n=9)], stream=stream)
        after = op("fill", [], [ref(2)], {"value": 1.0}, waits=[0])
        e.load("p", [op("fill", [], [ref(2)], {"value": 1.0}), (*bad[:7], 0), after], {}, 1)
        with pytest.raises(RuntimeError, match=r"p, instruction 1 \(copy\)"):
            e.run("p")


@pytest.mark.parametrize(
    ("instruction", "events", "words"),
    [
        (op("no_such_op", [], [ref(0)]), 0, "no_such_op.*no such kernel"),
        (op("fill", [], [ref(64)]), 0, "outside the device arena"),
        (op("fill", [], [("device", 2, "f32", (4,), (1,))]), 0, "not aligned"),
        (op("fill", [], [("device", -4, "f32", (4,), (1,))]), 0, "negative offset"),
        (op("fill", [], [("device", 0, "f32", (4, 4), (8, 2))]), 0, "not contiguous"),
        (op("fill", [], [("pinned", 0, "f32", (4,), (1,))]), 0, "outside the pinned arena"),
        (op("fill", [], [("device", 0, "f16", (4,), (1,))]), 0, "unknown dtype"),
        (op("fill", [], [ref(0)], stream="side"), 0, "unknown stream"),
        (op("fill", [], [ref(0)], waits=[0]), 1, "waits for event 0"),
        (op("fill", [], [ref(0)], signal=3), 1, "event 3 is out of range"),
        (op("fill", [], [ref(0)]), -1, "negative number of events"),
        (op("fill", [], [ref(0)])[:7], 0, "p, instruction 0: an instruction must be a tuple of 8"),
        (op("fill", [], [ref(0)[:4]]), 0, "p, instruction 0: a tensor must be a tuple of 5"),
        (op("fill", [], [list(ref(0))]), 0, "a tensor must be a tuple of 5"),
        (op("fill", [], [("device", "0", "f32", (4,), (1,))]), 0, "offset is of another type"),
        (op("fill", [], [("device", 0, "f32", (4, 4), (1,))]), 0, "as many strides"),
        (op("fill", [], [("device", 0, "f32", (1,) * 5, (1,) * 5)]), 0, "at most 4 dimensions"),
        (op("fill", [], [("device", 0, "f32", (3, 1), (2**62, 1))]), 0, "beyond 64 bits"),
        (op("fill", [], [("device", 0, "f32", (2**32, 2**32), (0, 1))]), 0, "beyond 64 bits|outside"),
        (op("fill", [], [("device", 2**63 - 8, "f64", (4,), (1,))]), 0, "beyond 64 bits"),
        (op("fill", [], [ref(0)], {"value": None}), 0, "attribute is of another type"),
    ],
)
def test_load_refuses(instruction, events: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine().load("p", [instruction], {}, events)


def test_arenas_have_the_size_asked_for_and_start_as_zeros() -> None:
    e = _native.Engine("cpu", 1)
    e.allocate("device", 12345)
    e.allocate("pinned", 64)
    assert e.allocated() == {"device": 12345, "pinned": 64}
    data = e.memory("device", 0, 12345)
    assert not data.any() and data.ctypes.data % 64 == 0
    data[7] = 9
    assert e.read("device", 7, 1)[0] == 9
    with pytest.raises(ValueError, match="allocated already"):
        e.allocate("device", 64)
    with pytest.raises(ValueError, match="outside the device arena"):
        e.memory("device", 12340, 6)


def test_pages_that_nobody_touches_cost_nothing() -> None:
    process = psutil.Process()
    e = _native.Engine("cpu", 1)
    before = process.memory_info().rss
    e.allocate("device", 64 << 30)
    e.memory("device", (64 << 30) - 1, 1)[0] = 1
    assert e.allocated() == {"device": 64 << 30}
    assert process.memory_info().rss - before < 16 << 20  # one page, be it a huge one, and what Python took meanwhile


def test_memory_keeps_the_engine_alive() -> None:
    data = engine().memory("device", 0, 64 * N)
    data[:] = 1
    assert int(data.sum()) == 64 * N


def test_unknown_backend_and_program() -> None:
    with pytest.raises(ValueError, match="no backend 'tpu'"):
        _native.Engine("tpu", 1)
    with pytest.raises(ValueError, match="no program 'p'"):
        engine().run("p")


def test_calls_from_several_threads_take_turns() -> None:
    """Runs that shared the worker threads would lose an update, fail or never end."""
    e = engine()
    step = [
        op("copy", [ref(0)], [ref(1)], stream="h2d", signal=0),
        op("add", [ref(1), ref(2)], [ref(0)], waits=[0]),
    ]
    floats(e, 2)[:] = 1
    e.load("p", step, {}, 1)
    e.inject_delays(0, 20)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: e.run("p"), range(200)))
    assert (floats(e, 0) == 200).all()


def test_a_failed_run_leaves_the_engine_usable() -> None:
    e = engine()
    fails = op("copy", [ref(0, n=8)], [ref(1, n=9)], stream="h2d", signal=0)
    e.load("bad", [fails, op("fill", [], [ref(2)], waits=[0])], {}, 1)
    e.load("good", pipeline(), {}, 5)
    floats(e, 0, "host")[:], floats(e, 1, "host")[:], floats(e, 1)[:] = 3, 5, 10
    for _ in range(3):
        with pytest.raises(RuntimeError, match="different shapes"):
            e.run("bad")
        e.run("good")
        assert (floats(e, 2, "host") == 13).all() and (floats(e, 3, "host") == 15).all()


def test_profile_counts_calls() -> None:
    e = engine()
    e.load("p", [op("fill", [], [ref(0)], {"value": 2.0}), op("add", [ref(0), ref(0)], [ref(1)])], {}, 0)
    e.run("p")
    e.profile(True)
    e.run("p")
    e.run("p")
    rows = {(p, i): (name, calls, seconds) for p, i, name, calls, seconds in e.profile_report()}
    assert rows["p", 0][:2] == ("fill", 2) and rows["p", 1][:2] == ("add", 2)
    assert all(seconds > 0 for _, _, seconds in rows.values())
    assert floats(e, 1)[0] == 4
