"""The part of ``config.json`` that all decoders share, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder; ``raw`` is the whole config."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    raw: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read Hugging Face's names; a missing or odd value raises :class:`UserError` naming the key."""

        def need(key: str) -> int:
            value = config.get(key)
            if not isinstance(value, int) or value <= 0:
                raise UserError(f"found {value!r}", where=f"config.json: {key}", expected="a positive integer")
            return value

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        if heads % kv_heads:
            raise UserError(
                f"{heads} attention heads cannot share {kv_heads} key-value heads evenly",
                where="config.json: num_key_value_heads",
            )
        if head_dim % 2:
            raise UserError(f"odd head size {head_dim}", where="config.json: head_dim", expected="an even number")
        if config.get("attention_dropout"):
            raise UserError(
                "attention dropout is not supported", where="config.json: attention_dropout", fix="set it to 0.0"
            )
        return cls(
            need("vocab_size"), hidden, need("intermediate_size"), need("num_hidden_layers"), heads, kv_heads, head_dim,
            float(config.get("rms_norm_eps", 1e-6)), bool(config.get("tie_word_embeddings", False)), config,
        )  # fmt: skip


def refuse(config: Mapping[str, Any], key: str, expected: Any) -> None:
    """Raise unless ``config[key]`` is absent or as expected: training another function would be silently wrong."""
    if config.get(key, expected) != expected:
        raise UserError(f"found {config[key]!r}", where=f"config.json: {key}", expected=repr(expected))


def layer_windows(config: Mapping[str, Any], layers: int) -> list[int]:
    """Sliding window of each layer, 0 where a layer sees the whole document (Qwen2's rules).

    ``layer_types`` decides where it is given; else ``use_sliding_window`` with the first ``max_window_layers`` layers
    unlimited.
    """
    window = int(config.get("sliding_window") or 0)
    if not config.get("use_sliding_window", False) or not window:
        return [0] * layers
    types = config.get("layer_types")
    if types:
        return [window if t == "sliding_attention" else 0 for t in types]
    first = int(config.get("max_window_layers", 28))
    return [window if index >= first else 0 for index in range(layers)]
