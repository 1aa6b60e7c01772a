"""Eight-bit block-wise storage of floats (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization").

A block of 256 neighbours has one float32, its largest magnitude; each element is the index of the nearest of 256
numbers between -1 and 1 (``dynamic_map``), times that. The numbers and the rounding are those of bitsandbytes.
"""

from __future__ import annotations

import functools

import numpy as np

BLOCK = 256
_SMALLEST = np.float32(1e-38)  # blocks that are smaller than this all over are stored as zeros


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 numbers, float32, ascending: 0, 1, and in each of seven decades down to 1e-6 twice as many, evenly
    spaced, as in the decade below. Signed: negatives too, but -1."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = _linspace(2**decade * (1 if signed else 2) + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2.0)
        scaled = np.float32(10.0 ** (decade - 6)) * middles
        numbers += scaled.tolist() + ((-scaled).tolist() if signed else [])
    return np.sort(np.array(numbers, np.float32))


def _linspace(n: int) -> np.ndarray:
    """``n`` numbers from 0.1 to 1 in float32, counted from the nearer end with one rounding, as PyTorch does."""
    step, index = np.float64((np.float32(1.0) - np.float32(0.1)) / np.float32(n - 1)), np.arange(n)
    low = np.float64(np.float32(0.1)) + step * index
    return np.where(index < n // 2, low, 1.0 - step * (n - 1 - index)).astype(np.float32)


@functools.cache
def table(signed: bool) -> np.ndarray:
    """What kernels need, float32[512]: the numbers; then, for each but the first, the least float32 that is stored as
    that number or a higher one (the middle of two numbers, up to the rounding of differences); then infinity."""
    code = dynamic_map(signed)
    low, high = _ordered(code[:-1]), _ordered(code[1:])
    for _ in range(32):  # bisect among the floats between two numbers: `low` is never nearer to the upper one
        middle = low + (high - low) // 2
        x = _float(middle)
        nearer = code[1:] - x < x - code[:-1]
        low, high = np.where(nearer, low, middle), np.where(nearer, middle, high)
    return np.concatenate([code, _float(high), np.array([np.inf], np.float32)])


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the float32."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _float(ordered: np.ndarray) -> np.ndarray:
    magnitude = np.abs(ordered).astype(np.uint32).view(np.float32)
    signed: np.ndarray = np.where(ordered < 0, -magnitude, magnitude)
    return signed


def quantize(x: np.ndarray, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (uint8[n]) and magnitudes (float32[n/256]) of finite float32[n]; between two numbers that are equally
    near the lower one is taken."""
    blocks = np.asarray(x, np.float32).reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (np.float32(1.0) / np.maximum(absmax, _SMALLEST))[:, None]
    scaled = np.clip(scaled, np.float32(-1.0), np.float32(1.0)).reshape(-1)
    right = np.searchsorted(code, scaled, side="left")
    left = np.maximum(right - 1, 0)
    nearer = (code[right] - scaled < scaled - code[left]) | (right == 0)
    return np.where(nearer, right, left).astype(np.uint8), absmax


def dequantize(index: np.ndarray, absmax: np.ndarray, code: np.ndarray) -> np.ndarray:
    """The stored numbers, float32[n]."""
    stored: np.ndarray = code[index.reshape(-1)].reshape(-1, BLOCK) * np.asarray(absmax, np.float32)[:, None]
    return stored.reshape(-1)
