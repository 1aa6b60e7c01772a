"""Mistral (Jiang et al. 2023): Llama with sliding-window attention in every layer, where the config has a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate.dsl import CausalLM
from surogate.models.config import ModelConfig, refuse
from surogate.models.llama import AttentionOptions, DecoderLayer, DecoderLM

MODEL_TYPE = "mistral"
ARCHITECTURES = ("MistralForCausalLM",)
TINY: dict[str, Any] = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 131, "hidden_size": 48,
    "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "sliding_window": 9, "rope_theta": 10000.0, "initializer_range": 0.2,
}  # fmt: skip


def build(config: Mapping[str, Any]) -> CausalLM:
    """Mistral of a Hugging Face config."""
    c = ModelConfig.read(config)
    refuse(config, "hidden_act", "silu")
    block = DecoderLayer(c, AttentionOptions(window=int(config.get("sliding_window") or 0)))
    return DecoderLM(c, [block] * c.layers)
