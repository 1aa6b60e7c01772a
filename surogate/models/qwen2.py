"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and windows in some layers if asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate.dsl import CausalLM
from surogate.models.config import ModelConfig, layer_windows, refuse
from surogate.models.llama import AttentionOptions, DecoderLayer, DecoderLM

MODEL_TYPE = "qwen2"
ARCHITECTURES = ("Qwen2ForCausalLM",)
TINY: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 131, "hidden_size": 48,
    "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "rope_theta": 10000.0,
    "initializer_range": 0.2,
}  # fmt: skip


def build(config: Mapping[str, Any]) -> CausalLM:
    """Qwen2 of a Hugging Face config."""
    c = ModelConfig.read(config)
    refuse(config, "hidden_act", "silu")
    blocks = {w: DecoderLayer(c, AttentionOptions(qkv_bias=True, window=w)) for w in layer_windows(config, c.layers)}
    return DecoderLM(c, [blocks[w] for w in layer_windows(config, c.layers)])
