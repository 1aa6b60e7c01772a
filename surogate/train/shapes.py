"""Shapes of published models, for measuring a training step without downloading anything."""

from __future__ import annotations

from typing import Any

from surogate.errors import UserError

# hidden, layers, heads, kv heads, head_dim, intermediate, tied head
_QWEN3 = {
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, True),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, False),
    "qwen3-14b": (5120, 40, 40, 8, 128, 17408, False),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25600, False),
}
_QWEN2 = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, True),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 128, 18944, False),
}
_LLAMA = {"smollm2-135m": (576, 30, 9, 3, 64, 1536, True)}
_VOCABULARY = {"qwen3": 151936, "qwen2": 151936, "llama": 49152}
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def names() -> list[str]:
    """Every model whose shape is known."""
    return [*_LLAMA, *_QWEN2, *_QWEN3]


def config_of(name: str) -> dict[str, Any]:
    """A ``config.json`` of that model's shape. Raises :class:`UserError` for an unknown name."""
    for kind, table in (("qwen3", _QWEN3), ("qwen2", _QWEN2), ("llama", _LLAMA)):
        if name.lower() in table:
            hidden, layers, heads, kv, dim, inner, tied = table[name.lower()]
            return {
                "model_type": kind,
                "architectures": [_CLASSES[kind]],
                "vocab_size": _VOCABULARY[kind],
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv,
                "head_dim": dim,
                "intermediate_size": inner,
                "tie_word_embeddings": tied,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "max_position_embeddings": 32768,
                "hidden_act": "silu",
            }
    raise UserError(f"no shape is known for '{name}'", where="--size", expected=f"one of {', '.join(names())}")
