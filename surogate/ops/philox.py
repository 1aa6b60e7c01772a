"""Philox4x32-10: random numbers as a function of (key, counter) (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC11). The same numbers come out whatever the order or the number of threads; csrc/cpu/philox.h is its twin.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds over ``counter`` (uint32[n,4]) with ``key`` (two 32-bit words); uint32[n,4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def random_words(numel: int, seed: int, salt: int) -> np.ndarray:
    """One 32-bit word for each element 0..numel-1 of a tensor, uint32[numel].

    Element i gets word i%4 of the block whose counter is (i//4, salt) and whose key is ``seed``, each a 64-bit number
    stored low word first.
    """
    block = np.arange((numel + 3) // 4, dtype=np.uint64)
    counter = np.empty((block.size, 4), np.uint32)
    counter[:, 0], counter[:, 1] = block & _LOW, block >> _HALF
    counter[:, 2], counter[:, 3] = salt & 0xFFFFFFFF, (salt >> 32) & 0xFFFFFFFF
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    return philox4x32(counter, key).reshape(-1)[:numel]
