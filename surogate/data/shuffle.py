"""Random choices that are the same for ever: hashes of positions, not the stream of a library's generator."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection on uint64 whose output looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def keys(count: int, *salts: int) -> np.ndarray:
    """Return uint64 [count]: a random number for each position, fixed by position and salts alone."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for salt in salts:
            state = _mix((state ^ np.uint64(salt & 0xFFFFFFFFFFFFFFFF)) + _GOLDEN)
        return _mix(state + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)


def permutation(count: int, *salts: int) -> np.ndarray:
    """Return int64 [count]: the positions in random order."""
    return np.argsort(keys(count, *salts), kind="stable").astype(np.int64)
