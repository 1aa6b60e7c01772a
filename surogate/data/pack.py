"""Bin packing: pieces of documents into sequences of equal length."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: longest piece first, each into the fullest bin that still has room.

    It never uses more than 11/9 of the best possible number of bins, and one a constant (Johnson 1974).

    Args:
        lengths: int64 [n], each from 1 to ``capacity``.
        capacity: size of a bin.

    Returns:
        int64 [n]: the bin of each piece, numbered from 0 without gaps.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    room: dict[int, list[int]] = {}  # free positions -> bins with just so many
    rooms: list[int] = []  # the keys of `room`, ascending: their number is bounded by the capacity, not by the bins
    count = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            target, left = count, capacity - length
            count += 1
        else:
            free = rooms[at]
            target, left = room[free].pop(), free - length
            if not room[free]:
                del room[free], rooms[at]
        bins[piece] = target
        if left:
            if left in room:
                room[left].append(target)
            else:
                room[left] = [target]
                insort(rooms, left)
    return bins
