"""Collectives of ranks that are threads, against NumPy; the pass that puts them on a stream of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate import _native
from surogate.compile.collectives import buckets, on_streams
from surogate.compile.program import Instruction, Program, TensorRef


def together(ranks: int, op: str, tensors: list[np.ndarray], **attrs: Any) -> list[np.ndarray]:
    """Run one collective on threads; what every rank holds afterwards."""
    group = _native.thread_group(ranks)
    name = {"float32": "f32", "float64": "f64", "int32": "i32"}[tensors[0].dtype.name]

    def one(rank: int) -> np.ndarray:
        engine = _native.Engine("cpu", 1)
        engine.join(group[rank])
        engine.allocate("device", tensors[rank].nbytes)
        engine.write("device", 0, tensors[rank])
        ref = ("device", 0, name, (tensors[rank].size,), (1,))
        engine.load("go", [(op, [ref], [ref], None, attrs, "comm", [], -1)], {}, 0)
        engine.run("go")
        return np.array(engine.read("device", 0, tensors[rank].nbytes)).view(tensors[rank].dtype)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 12, 120, 24_000])
def test_sums_are_those_of_the_ranks_in_order(ranks: int, dtype: Any, size: int) -> None:
    rng = np.random.default_rng(size + ranks)
    given_ = [(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)).astype(dtype) for _ in range(ranks)]
    expected = given_[0].copy()
    for term in given_[1:]:
        expected = expected + term
    for found in together(ranks, "all_reduce", given_):
        assert (found == expected).all()
    if size % ranks == 0:
        n = size // ranks
        for rank, found in enumerate(together(ranks, "reduce_scatter", given_)):
            part = slice(rank * n, (rank + 1) * n)
            assert (found[part] == expected[part]).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathering_and_broadcast(ranks: int) -> None:
    given_ = [np.arange(6, dtype=np.int32) + 100 * r for r in range(ranks)]
    n = 6 // ranks
    expected = np.concatenate([given_[r][r * n : (r + 1) * n] for r in range(ranks)])
    assert all((found == expected).all() for found in together(ranks, "all_gather", given_))
    for root in range(ranks):
        assert all((found == given_[root]).all() for found in together(ranks, "broadcast", given_, root=root))


def test_wrong_sizes_and_dtypes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="different programs|has stopped"):
        together(2, "all_reduce", [np.zeros(4, np.float32), np.zeros(5, np.float32)])
    with pytest.raises(RuntimeError, match="no sums over ranks of i32|has stopped"):
        together(2, "all_reduce", [np.zeros(4, np.int32)] * 2)
    with pytest.raises(RuntimeError, match="not whole parts|has stopped"):
        together(2, "all_gather", [np.zeros(5, np.float32)] * 2)


def test_a_rank_that_fails_frees_those_that_wait() -> None:
    group = _native.thread_group(3)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(group[r].barrier) for r in (0, 1)]
        group[2].abort("out of room")
        for future in waiting:
            with pytest.raises(_native.RankStopped, match="rank 2 has stopped: out of room"):
                future.result()
    with pytest.raises(_native.RankStopped, match="rank 2"):
        group[0].barrier()


def _ref(offset: int, n: int) -> TensorRef:
    return TensorRef("device", offset, "f32", (n,), (1,))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5)), max_size=24))
@settings(max_examples=200, deadline=None)
def test_every_conflict_between_streams_is_ordered(plan: list[tuple[bool, int, int]]) -> None:
    instructions = []
    for collective, a, b in plan:
        op = "all_reduce" if collective else "copy"
        refs = [_ref(a * 64, 16)], [_ref((a if collective else b) * 64, 16)]
        instructions.append(Instruction(op, list(refs[0]), list(refs[1]), None, {}))
    done = on_streams(Program("p", instructions, {}))
    # What is sure to have ended when an instruction starts: its stream's earlier ones, what it waits for, and so on.
    before: list[set[int]] = []
    signals: dict[int, int] = {}
    last: dict[str, int] = {}
    for n, i in enumerate(done.instructions):
        sure: set[int] = set()
        for m in [*([last[i.stream]] if i.stream in last else []), *(signals[w] for w in i.waits)]:
            sure |= {m} | before[m]
        before.append(sure)
        last[i.stream] = n
        if i.signal >= 0:
            signals[i.signal] = n
    for n, i in enumerate(done.instructions):
        for m, j in enumerate(done.instructions[:n]):
            writes = {r.offset for r in i.outputs if r}, {r.offset for r in j.outputs if r}
            reads = {r.offset for r in i.inputs if r}, {r.offset for r in j.inputs if r}
            if writes[0] & (writes[1] | reads[1]) or writes[1] & reads[0]:
                assert m in before[n]
    assert done.events == len(signals)
    assert [replace(i, stream="compute", waits=[], signal=-1) for i in done.instructions] == instructions


def test_buckets_cut_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate.compile import collectives

    monkeypatch.setattr(collectives, "BUCKET_BYTES", 400)
    sizes = {"a": 300, "b": 50, "c": 50, "d": 1, "e": 99}
    assert buckets(list(sizes), sizes) == [("a",), ("b", "c"), ("d", "e")]
