"""Packing and order: a permutation of the rows, in which no piece is lost, split without need, or seen twice."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate.data import Order, Shard, epoch_order, max_documents
from surogate.data.pack import best_fit
from surogate.data.prepare import hold_back

_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def shard_of(lengths: list[int] | np.ndarray, sets: list[tuple[int, int, float]] | None = None) -> Shard:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Shard(Path("nowhere"), offsets, np.arange(len(lengths)), sets or [(0, len(lengths), 1.0)])


def order_of(shard: Shard, **changes: object) -> Order:
    arguments = {"sequence_len": 16, "packing": True, "seed": 7, "epoch": 0, "global_batch": 4, **changes}
    return epoch_order(shard, **arguments)  # type: ignore[arg-type]


@given(lengths=_lengths, packing=st.booleans(), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 3))
@settings(deadline=None)
def test_pieces_are_the_rows_and_nothing_else(lengths: list[int], packing: bool, seed: int, epoch: int) -> None:
    shard = shard_of(lengths)
    order = order_of(shard, packing=packing, seed=seed, epoch=epoch)
    start, length, continues = order.pieces.T
    # Sorted by place, the pieces are the tokens without gap or overlap, and a row ends where a piece does not continue.
    by_place = np.argsort(start)
    ends = (start + length)[by_place]
    assert start[by_place].tolist() == [0, *ends[:-1].tolist()]
    assert ends[continues[by_place] == 0].tolist() == shard.offsets[1:].tolist()
    # Only rows that are too long are split.
    whole = length[continues == 0]
    assert (length[continues == 1] == 16).all() and (length >= 1).all() and (whole <= 16).all()
    # Sequences hold their pieces, in order, and whole steps.
    assert order.sequences[0] == 0 and order.sequences[-1] == len(order.pieces)
    assert (np.diff(order.sequences) >= 0).all() and len(order) % 4 == 0
    filled = [int(length[a:b].sum()) for a, b in zip(order.sequences, order.sequences[1:], strict=False)]
    assert max(filled) <= 16
    if not packing:
        assert np.diff(order.sequences).max() == 1
    assert len(order) - sum(f > 0 for f in filled) < 4


@given(lengths=_lengths, batch=st.sampled_from([1, 2, 4]), packing=st.booleans())
@settings(deadline=None)
def test_max_documents_counts_padding_as_a_document(lengths: list[int], batch: int, packing: bool) -> None:
    order = order_of(shard_of(lengths), packing=packing)
    most = 0
    for first in range(0, len(order), batch):
        documents = 0
        for i in range(first, first + batch):
            pieces = order.pieces[order.sequences[i] : order.sequences[i + 1]]
            documents += len(pieces) + (pieces[:, 1].sum() < 16)
        most = max(most, documents)
    assert max_documents(order, batch) == most == max_documents([order, order], batch)


@given(lengths=st.lists(st.integers(1, 20), max_size=80), capacity=st.integers(20, 40))
@settings(deadline=None)
def test_best_fit_fills_no_bin_too_full_and_opens_none_too_early(lengths: list[int], capacity: int) -> None:
    bins = best_fit(np.array(lengths, np.int64), capacity)
    room: dict[int, int] = {}
    # Replay in decreasing order: a piece goes where the least room is that suffices.
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [left for left in room.values() if left >= lengths[piece]]
        target = int(bins[piece])
        assert room.get(target, capacity) == (min(fitting) if fitting else capacity)
        assert target in room or target == len(room)
        room[target] = room.get(target, capacity) - lengths[piece]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    shard = shard_of(np.random.default_rng(0).integers(1, 16, 500))
    same, again = order_of(shard), order_of(shard, global_batch=64)
    assert (same.pieces == again.pieces).all() and len(again) % 64 == 0
    assert (same.sequences == again.sequences[: len(same.sequences)]).all()
    assert (same.pieces != order_of(shard, seed=8).pieces).any()
    assert (same.pieces != order_of(shard, epoch=1).pieces).any()


def test_the_order_of_a_known_case_never_changes() -> None:
    """A run is resumed by another version of the libraries: the order must be the same for ever."""
    order = order_of(shard_of([5, 20, 9, 3, 16, 7]))
    # Row 1 (20 tokens from place 5) is split; its rest of 4 shares a sequence with rows 0 and 3.
    assert order.pieces.tolist() == [
        [5, 16, 1], [37, 16, 0], [25, 9, 0], [53, 7, 0], [0, 5, 0], [34, 3, 0], [21, 4, 0]
    ]  # fmt: skip
    assert order.sequences.tolist() == [0, 1, 2, 4, 7]


def test_realistic_lengths_fill_98_percent_within_seconds() -> None:
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(5.6, 0.9, 100_000), 8, 2048).astype(np.int64)  # median 270 tokens
    start = time.perf_counter()
    order = order_of(shard_of(lengths), sequence_len=2048)
    assert time.perf_counter() - start < 5
    assert order.used >= 0.98
    assert len(order.pieces) == 100_000


def test_sequences_are_in_random_order_of_length() -> None:
    """Best-fit decreasing must not leave the long rows at the front of the epoch."""
    lengths = np.random.default_rng(2).integers(1, 200, 4000)
    order = order_of(shard_of(lengths), sequence_len=256, global_batch=1)
    counts = np.diff(order.sequences)
    front, back = counts[: len(counts) // 2].mean(), counts[len(counts) // 2 :].mean()
    assert abs(front - back) < 0.3


def test_weights_repeat_rows_and_draw_fractions_anew() -> None:
    shard = shard_of([4] * 30, [(0, 10, 2.0), (10, 30, 0.5)])
    seen = []
    for epoch in (0, 1):
        rows = order_of(shard, epoch=epoch).pieces[:, 0] // 4
        assert np.bincount(rows, minlength=30)[:10].tolist() == [2] * 10
        halves = rows[rows >= 10]
        assert len(halves) == len(set(halves.tolist())) == 10
        seen.append(set(halves.tolist()))
    assert seen[0] != seen[1]


@given(rows=st.integers(2, 50), ratio=st.floats(0.001, 0.999), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_held_back_rows_are_a_partition(rows: int, ratio: float, seed: int) -> None:
    train, held = hold_back(shard_of([3] * rows), ratio, seed)
    assert sorted([*train.index.tolist(), *held.index.tolist()]) == list(range(rows))
    assert train.rows >= 1 and held.rows >= 1 and abs(held.rows - ratio * rows) <= 1
    more = hold_back(shard_of([3] * rows), min(0.999, ratio * 1.5), seed)[1]
    assert set(held.index.tolist()) <= set(more.index.tolist())
    taken = order_of(train).pieces[:, 0] // 3
    assert sorted(taken.tolist()) == train.index.tolist()


def test_nothing_to_hold_back() -> None:
    from surogate.errors import UserError

    with pytest.raises(UserError, match="one row"):
        hold_back(shard_of([3]), 0.1, 0)
