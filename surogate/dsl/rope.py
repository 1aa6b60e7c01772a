"""Rotary position embedding: frequencies as ``config.json`` describes them, and the table of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from surogate.dsl.tensor import Tensor, constant
from surogate.errors import UserError


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim/2] and the factor on cos and sin, from a Hugging Face config.

    Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling``. Types: ``default``; ``linear``;
    ``llama3`` (Llama 3.1 model card); ``yarn`` (Peng et al. 2023, equations 17 to 23). Others raise
    :class:`UserError`, since training with the wrong positions would be silently wrong.
    """
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = params.get("rope_type") or params.get("type") or "default"
    if float(params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError("partial rotary embedding is not supported", where="config.json: partial_rotary_factor")
    inv = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "default":
        return inv, 1.0
    if kind == "linear":
        return inv / float(params["factor"]), 1.0
    if kind == "llama3":
        return _llama3(inv, params), 1.0
    if kind == "yarn":
        return _yarn(inv, params, config, theta, head_dim)
    raise UserError(
        f"rope type '{kind}' is not supported",
        where="config.json: rope_scaling",
        expected="default, linear, llama3 or yarn",
    )


def _llama3(inv: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """Keep short wavelengths, divide long ones by ``factor``, blend between."""
    factor, low, high = (float(params[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(params["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv
    blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return inv * (blend + (1 - blend) / factor)


def _yarn(
    inv: np.ndarray, params: Mapping[str, Any], config: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[np.ndarray, float]:
    """NTK-by-parts: extrapolate fast dimensions, interpolate slow ones, and sharpen attention."""
    original = float(params.get("original_max_position_embeddings") or config["max_position_embeddings"])
    factor = float(params.get("factor") or config["max_position_embeddings"] / original)

    def get_mscale(scale: float, mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention = params.get("attention_factor")
    if attention is None:
        m, m_all = params.get("mscale"), params.get("mscale_all_dim")
        attention = get_mscale(factor, m) / get_mscale(factor, m_all) if m and m_all else get_mscale(factor)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(params.get("beta_fast") or 32)), dimension(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return inv / factor * ramp + inv * (1 - ramp), float(attention)


class RopeTable:
    """cos and sin for the positions of a micro-batch: computed once, read by every layer."""

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        self.inverse_frequencies, self.factor = rope_frequencies(config, head_dim)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions[T] int32 -> cos, sin [T, head_dim/2]."""
        g = positions.graph
        inv = constant(g, "rope.inv_freq", self.inverse_frequencies)
        cos, sin = g.emit("rope_table", [positions.value, inv.value], scale=float(self.factor))
        assert cos is not None and sin is not None
        return Tensor(g, cos), Tensor(g, sin)
