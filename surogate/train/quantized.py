"""Loading quantised weights: from the file into four bits, one weight in memory at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from surogate import _native
from surogate.compile.quantize import Quantized
from surogate.errors import UserError
from surogate.ops import nf4
from surogate.ops.blockwise8 import table
from surogate.train.runtime import Runtime

if TYPE_CHECKING:
    from surogate.io.weights import WeightSource


def load_quantized(runtime: Runtime, weight: Quantized, name: str, source: WeightSource, where: str) -> None:
    """Read a weight, rounded to its dtype as bitsandbytes would find it, and store it in NF4.

    Args:
        runtime: whose memory is filled.
        weight: where its parts are.
        name: in ``source``.
        source: the checkpoint.
        where: the checkpoint's folder, for messages.

    Raises:
        UserError: the weight has values that are not finite.
    """
    dtype: Literal["f32", "bf16"] = "bf16" if weight.dtype == "bf16" else "f32"
    values = np.empty(weight.shape, np.uint16 if dtype == "bf16" else np.float32)
    source.read_into(name, values, dtype)
    codes = np.empty(values.size // 2, np.uint8)
    absmax = np.empty(-(-values.size // nf4.BLOCK), np.float32)
    _native.quantize_4bit(values, dtype, nf4.NF4, nf4.BLOCK, codes, absmax, runtime.threads)
    if not np.isfinite(absmax).all():
        raise UserError(f"{name} has values that are not finite", where=where, fix="download the model again")
    offset = absmax.mean(dtype=np.float64).astype(np.float32)
    index, groups = np.empty(absmax.size, np.uint8), np.empty(-(-absmax.size // nf4.GROUP), np.float32)
    _native.quantize_8bit(absmax - offset, table(True), index, groups, runtime.threads)
    for slot, part in zip(weight.slots, (codes, index, groups, offset.reshape(1)), strict=True):
        runtime.write(runtime.compiled.memory.ref(slot), part)
