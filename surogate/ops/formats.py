"""Narrow floating formats: E4M3 and E5M2 (Micikevicius et al. 2022, "FP8 formats for deep learning") and E2M1 (OCP
Microscaling specification 1.0), and the power-of-two scales that take tensors into them.

Values beyond the largest are stored as it, infinities too, as the hardware's saturating conversions do. A NaN stays a
NaN; E2M1, which has none, stores its largest value. The native twin is csrc/core/formats.h.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """``mantissa`` digits are stored; ``bias`` of the exponent; ``largest``: code of the largest finite value."""

    name: str
    bits: int
    mantissa: int
    bias: int
    largest: int
    nan: int

    @property
    def sign(self) -> int:
        """The bit of a code that says that the value is negative."""
        return 1 << (self.bits - 1)

    @property
    def least(self) -> int:
        """Exponent of the smallest normal value; smaller ones have its distance from each other."""
        return 1 - self.bias

    @functools.cached_property
    def values(self) -> np.ndarray:
        """What each code means, float64[2^bits]."""
        codes = np.arange(1 << self.bits)
        magnitude = codes & (self.sign - 1)
        field, digits = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        whole = np.where(field > 0, digits + (1 << self.mantissa), digits)
        values = np.ldexp(whole.astype(np.float64), np.maximum(field, 1) - self.bias - self.mantissa)
        if self.nan > self.largest:
            values = np.where(magnitude > self.largest, np.nan, values)
        if self.name == "e5m2":  # the only one with infinities
            values = np.where(magnitude == self.largest + 1, np.inf, values)
        return np.asarray(np.where(codes & self.sign, -values, values))

    @property
    def top(self) -> float:
        """The largest finite value."""
        return float(self.values[self.largest])

    def encode(self, x: np.ndarray, words: np.ndarray | None = None) -> np.ndarray:
        """Codes (uint8) of values: to nearest, ties to even; with ``words`` (uniform uint32, one a value) to one of the
        two neighbours, so that the mean is the value (up to 2^-32 of their distance)."""
        with np.errstate(invalid="ignore"):  # signalling NaNs
            x = np.asarray(x, np.float64)
        a = np.minimum(np.nan_to_num(np.abs(x), nan=0.0, posinf=self.top), self.top)
        exponent = np.where(a > 0, np.maximum(np.frexp(a)[1] - 1, self.least), self.least)
        scaled = np.ldexp(a, self.mantissa - exponent)
        if words is None:
            digits = np.rint(scaled).astype(np.int64)
        else:
            fixed = np.floor(np.ldexp(scaled, 32)).astype(np.uint64)
            digits = ((fixed + words.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
        code = np.minimum(((exponent - self.least) << self.mantissa) + digits, self.largest)
        code = np.where(np.signbit(x), code | self.sign, code)
        return np.where(np.isnan(x), self.nan, code).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Values (float64) of codes."""
        return np.asarray(self.values[codes])

    def scale_for(self, amax: float) -> float:
        """The largest power of two that takes a tensor with this largest magnitude into the format; 1 where it is zero
        or not finite. At most 2^100."""
        if amax == 0 or not np.isfinite(amax):
            return 1.0
        most, power_most = np.frexp(self.top)
        digits, power = np.frexp(amax)
        power = int(power_most) - max(int(power), -125) - int(digits > most and power >= -125)
        return float(np.ldexp(1.0, min(power, 100)))


E4M3 = Format("e4m3", 8, 3, 7, 0x7E, 0x7F)
E5M2 = Format("e5m2", 8, 2, 15, 0x7B, 0x7F)
E2M1 = Format("e2m1", 4, 1, 1, 0x7, 0x7)
