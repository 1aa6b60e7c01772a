"""The order in which a shard is trained: pieces of rows, gathered into sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from surogate.data.pack import best_fit
from surogate.data.shards import Shard
from surogate.data.shuffle import keys, permutation

WINDOW = 1 << 16
"""Pieces that are packed together: the more, the fuller the sequences; the fewer, the more random their company."""

_SHUFFLE, _SEQUENCES, _PART = 1, 2, 3  # salts


@dataclass(frozen=True)
class Order:
    """Sequences in the order of training (docs/architecture.md, "Tokens").

    Attributes:
        pieces: int64 [n, 3]: start in the shard's tokens, length, continues.
        sequences: int64 [m + 1]: the pieces of sequence i are ``sequences[i]`` to ``sequences[i + 1]``.
        sequence_len: positions of a sequence.
    """

    pieces: np.ndarray
    sequences: np.ndarray
    sequence_len: int

    def __len__(self) -> int:
        return len(self.sequences) - 1

    @property
    def used(self) -> float:
        """Share of positions that hold a token, over the sequences that have any."""
        filled = int((np.diff(self.sequences) > 0).sum())
        return float(self.pieces[:, 1].sum()) / (filled * self.sequence_len) if filled else 0.0

    def __str__(self) -> str:
        filled = int((np.diff(self.sequences) > 0).sum())
        return f"{filled:,} sequences of {self.sequence_len:,} positions, {self.used:.1%} of them used"


def epoch_order(shard: Shard, *, sequence_len: int, packing: bool, seed: int, epoch: int, global_batch: int) -> Order:
    """Return the order of one epoch. It depends on the data, ``seed`` and ``epoch``, and on nothing else.

    Rows longer than ``sequence_len`` become several pieces (only the last one does not continue); no other row is
    split. With ``packing`` pieces share sequences by best-fit decreasing within windows of shuffled pieces, and the
    sequences are shuffled again; without, each piece has a sequence of its own.

    Args:
        shard: the rows.
        sequence_len: positions of a sequence.
        packing: several pieces a sequence.
        seed: of the run.
        epoch: from 0.
        global_batch: sequences in an optimizer step; empty ones fill the last step.
    """
    rows = _rows_of_epoch(shard, seed, epoch)
    rows = rows[permutation(len(rows), seed, epoch, _SHUFFLE)]
    pieces = _pieces(shard.offsets[rows], shard.offsets[rows + 1] - shard.offsets[rows], sequence_len)
    if packing:
        bins = _bins(pieces[:, 1], sequence_len)
        count = int(bins.max(initial=-1)) + 1
        rank = np.empty(count, np.int64)
        rank[permutation(count, seed, epoch, _SEQUENCES)] = np.arange(count)
        place = rank[bins]
        pieces = pieces[np.argsort(place, kind="stable")]
        sizes = np.bincount(place, minlength=count)
    else:
        sizes = np.ones(len(pieces), np.int64)
    fill = -len(sizes) % global_batch
    sequences = np.concatenate([[0], np.cumsum(sizes), np.full(fill, len(pieces))]).astype(np.int64)
    return Order(np.ascontiguousarray(pieces), sequences, sequence_len)


def max_documents(orders: Order | Iterable[Order], batch: int) -> int:
    """Return the most documents that a micro-batch of ``batch`` consecutive sequences can have.

    The padding of a sequence is a document of its own.
    """
    most = 1
    for order in [orders] if isinstance(orders, Order) else orders:
        counts = np.diff(order.sequences)
        ends = np.concatenate([[0], np.cumsum(order.pieces[:, 1])])
        used = ends[order.sequences[1:]] - ends[order.sequences[:-1]]
        documents = counts + (used < order.sequence_len)
        documents = np.concatenate([documents, np.ones(-len(documents) % batch, np.int64)])
        most = max(most, int(documents.reshape(-1, batch).sum(1).max(initial=1)))
    return most


def _rows_of_epoch(shard: Shard, seed: int, epoch: int) -> np.ndarray:
    """Every row as often as the weight of its data set says; fractions are drawn anew in each epoch."""
    chosen = []
    for number, (first, last, weight) in enumerate(shard.sets):
        own = shard.index[np.searchsorted(shard.index, first) : np.searchsorted(shard.index, last)]
        whole, part = int(weight), weight - int(weight)
        chosen += [own] * whole
        if part:
            drawn = np.argsort(keys(len(own), seed, epoch, _PART, number), kind="stable")[: round(part * len(own))]
            chosen.append(own[np.sort(drawn)])
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def _pieces(starts: np.ndarray, lengths: np.ndarray, limit: int) -> np.ndarray:
    """Cut rows into pieces of at most ``limit`` tokens: int64 [n, 3]."""
    counts = np.maximum(1, -(-lengths // limit))
    row = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    continues = within < counts[row] - 1
    length = np.where(continues, limit, lengths[row] - within * limit)
    return np.stack([starts[row] + within * limit, length, continues], axis=1).astype(np.int64)


def _bins(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack window by window; full pieces need no packing."""
    bins = np.empty(len(lengths), np.int64)
    full = lengths == capacity
    count = int(full.sum())
    bins[full] = np.arange(count)
    rest = np.flatnonzero(~full)
    for start in range(0, len(rest), WINDOW):
        window = rest[start : start + WINDOW]
        own = best_fit(lengths[window], capacity)
        bins[window] = own + count
        count += int(own.max()) + 1
    return bins
