"""Storage dtypes of checkpoints and their conversion, slice by slice.

NumPy has no bfloat16: a bf16 tensor is held as ``uint16`` bit patterns here (the upper half of an IEEE-754 binary32).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

TargetDType = Literal["f32", "bf16"]
Array = np.ndarray[Any, Any]

# Elements per slice of a conversion: 1 MiB of f32, small enough to stay in a core's L2 cache.
SLICE = 1 << 18

# Our name -> the NumPy dtype that holds its bits. Names are the lower-case ones of the safetensors format.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "i64": np.dtype("<i8"),
    "i32": np.dtype("<i4"),
    "i16": np.dtype("<i2"),
    "i8": np.dtype("i1"),
    "u64": np.dtype("<u8"),
    "u32": np.dtype("<u4"),
    "u16": np.dtype("<u2"),
    "u8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
# What a weight may be stored as. Anything else is quantised or not a weight.
FLOAT_DTYPES = ("f64", "f32", "f16", "bf16")
TARGET_BYTES: dict[str, int] = {"f32": 4, "bf16": 2}


def bf16_to_f32(bits: Array, out: Array | None = None) -> Array:
    """Widen bf16 bit patterns (``uint16``) to ``float32``; exact. ``out`` takes the result if given."""
    if out is None:
        out = np.empty(bits.shape, np.float32)
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    return out


def f32_to_bf16(x: Array, out: Array | None = None) -> Array:
    """Round ``float32`` to bf16 bit patterns (``uint16``), to nearest, ties to even. NaN stays NaN (made quiet).

    ``out``, contiguous and of the same shape, takes the result if given.
    """
    x = np.ascontiguousarray(x, np.float32)
    if out is None:
        out = np.empty(x.shape, np.uint16)
    source, target = x.reshape(-1), out.reshape(-1)
    for start in range(0, source.size, SLICE):
        _round_slice(source[start : start + SLICE], target[start : start + SLICE])
    return out


def _round_slice(x: Array, out: Array) -> None:
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF  # ties go to the even neighbour
    rounded += bits  # may carry into the exponent: that is the right rounding, up to infinity
    rounded >>= 16
    nan = np.isnan(x)
    if nan.any():  # the carry would turn some NaNs into infinity or zero
        rounded[nan] = (bits[nan] >> 16) | 0x40
    np.copyto(out, rounded, casting="unsafe")


def convert_into(source: Array, source_dtype: str, out: Array, out_dtype: TargetDType) -> None:
    """Convert a flat array of ``source_dtype`` bits into the flat array ``out`` of the same length.

    Args:
        source: 1-D, dtype ``NUMPY_DTYPES[source_dtype]``.
        source_dtype: one of ``FLOAT_DTYPES``.
        out: 1-D, contiguous, ``float32`` for ``"f32"``, ``uint16`` for ``"bf16"``.
        out_dtype: rounding is to nearest, ties to even.
    """
    if source_dtype not in FLOAT_DTYPES:
        raise ValueError(f"cannot convert {source_dtype}")
    if source_dtype == out_dtype:
        out[:] = source
        return
    for start in range(0, source.size, SLICE):
        part, target = source[start : start + SLICE], out[start : start + SLICE]
        if out_dtype == "f32":
            if source_dtype == "bf16":
                bf16_to_f32(part, target)
            else:
                np.copyto(target, part, casting="same_kind")
        else:  # f16 widens exactly, so one rounding is left
            f32_to_bf16(part.astype(np.float32), target)
