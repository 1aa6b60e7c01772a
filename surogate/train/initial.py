"""First values of weights that no file holds: adapters, and whole models in pre-training from scratch."""

from __future__ import annotations

import hashlib

import numpy as np

from surogate.io.dtypes import f32_to_bf16

_SLICE = 1 << 20  # elements drawn at a time, so that no second copy of a weight is made


def initialise(target: np.ndarray, how: str, *, name: str, seed: int, std: float) -> None:
    """Fill a weight in place. The values depend on the name and the seed alone, not on order, layout or threads.

    Args:
        target: the weight, float32, or uint16 for the bits of bf16; dense.
        how: ``normal`` (mean 0, deviation ``std``), ``ones``, ``zeros``, or ``lora_a`` (uniform within
            1/sqrt(inputs), PEFT's Kaiming initialisation with a = sqrt(5)).
        name: the weight's name.
        seed: of the run.
        std: the model's ``initializer_range``.
    """
    flat = target.reshape(-1)
    if how == "zeros":
        flat[:] = 0
        return
    if how == "ones":
        flat[:] = 0x3F80 if flat.dtype == np.uint16 else 1.0
        return
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
    rng = np.random.Generator(np.random.Philox(key=key))
    bound = 1.0 / np.sqrt(target.shape[-1])
    for start in range(0, flat.size, _SLICE):
        n = min(_SLICE, flat.size - start)
        if how == "normal":
            drawn = rng.standard_normal(n, np.float32) * np.float32(std)
        elif how == "lora_a":
            drawn = (rng.random(n, np.float32) * 2 - 1) * np.float32(bound)
        else:
            raise ValueError(f"initialisation {how}")
        flat[start : start + n] = f32_to_bf16(drawn) if flat.dtype == np.uint16 else drawn
