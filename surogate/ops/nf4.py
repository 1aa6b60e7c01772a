"""Four-bit block-wise storage of weights (Dettmers et al. 2023, "QLoRA"): NF4 with double quantisation.

Each weight is the index of the nearest of 16 numbers, times the largest magnitude of its block of 64 neighbours. The
magnitudes, less their mean, are themselves stored in eight bits, in blocks of 256 (``surogate.ops.blockwise8``).
Numbers, rounding and order of the bits are those of bitsandbytes: of two weights that share a byte, the first has the
high half.
"""

from __future__ import annotations

import numpy as np

from surogate.ops import blockwise8

BLOCK = 64  # weights that share a magnitude
GROUP = blockwise8.BLOCK  # magnitudes that share one

# Quantiles of a normal distribution, scaled to 1, with 0 among them (appendix E of the paper), as bitsandbytes rounds.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_SMALLEST = np.float32(1e-38)


def quantize(x: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8[n/2], two weights a byte) and magnitudes (float32[ceil(n/block)]) of finite float32[n]; of two
    numbers that are equally near the lower one is taken. ``n`` is even."""
    x = np.asarray(x, np.float32).reshape(-1)
    blocks = np.append(x, np.zeros(-x.size % block, np.float32)).reshape(-1, block)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (np.float32(1.0) / np.maximum(absmax, _SMALLEST))[:, None]
    middles = (NF4[:-1] + NF4[1:]) / np.float32(2.0)
    index = np.searchsorted(middles, np.clip(scaled, -1, 1).reshape(-1)[: x.size], side="left").astype(np.uint8)
    return index[::2] << 4 | index[1::2], absmax


def quantize_magnitudes(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Double quantisation: indices (uint8, one a magnitude), the groups' magnitudes (float32), and the mean."""
    offset = np.float32(absmax.mean(dtype=np.float64))
    rest = np.asarray(absmax, np.float32) - offset
    padded = np.append(rest, np.zeros(-rest.size % GROUP, np.float32))
    index, groups = blockwise8.quantize(padded, blockwise8.dynamic_map(True))
    return index[: rest.size], groups, offset


def magnitudes(index: np.ndarray, groups: np.ndarray, offset: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The blocks' magnitudes, float32, from double quantisation. ``numbers``: of eight bits (the first 256 count)."""
    scale = np.repeat(np.asarray(groups, np.float32), GROUP)[: index.size]
    found: np.ndarray = np.asarray(numbers, np.float32)[index] * scale + np.asarray(offset, np.float32).reshape(-1)[0]
    return found


def dequantize(codes: np.ndarray, absmax: np.ndarray, numbers: np.ndarray = NF4, block: int = BLOCK) -> np.ndarray:
    """The stored weights, float32[n]."""
    index = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
    scale = np.repeat(np.asarray(absmax, np.float32), block)[: index.size]
    found: np.ndarray = np.asarray(numbers, np.float32)[index] * scale
    return found
