"""Qwen3, dense (Yang et al. 2025): Llama with an RMSNorm over each head of q and k, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate.dsl import CausalLM
from surogate.models.config import ModelConfig, layer_windows, refuse
from surogate.models.llama import AttentionOptions, DecoderLayer, DecoderLM

MODEL_TYPE = "qwen3"
ARCHITECTURES = ("Qwen3ForCausalLM",)
TINY: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 131, "hidden_size": 48,
    "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 10, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "rope_theta": 1000000.0, "initializer_range": 0.2,
}  # fmt: skip


def build(config: Mapping[str, Any]) -> CausalLM:
    """Qwen3 of a Hugging Face config."""
    c = ModelConfig.read(config)
    refuse(config, "hidden_act", "silu")
    biased = bool(config.get("attention_bias", False))
    blocks = {
        w: DecoderLayer(c, AttentionOptions(qkv_bias=biased, out_bias=biased, head_norm=True, window=w))
        for w in layer_windows(config, c.layers)
    }
    return DecoderLM(c, [blocks[w] for w in layer_windows(config, c.layers)])
