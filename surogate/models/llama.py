"""Llama (Touvron et al. 2023; Llama 2, 3, 3.1, 3.2; SmolLM2): pre-norm decoder, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate.dsl import (
    Batch,
    CausalLM,
    Embedding,
    Layers,
    Linear,
    Module,
    RMSNorm,
    RopeTable,
    Tensor,
    attention,
    rope,
    silu,
)
from surogate.models.config import ModelConfig, refuse

MODEL_TYPE = "llama"
ARCHITECTURES = ("LlamaForCausalLM",)
TINY: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 48,
    "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_theta": 10000.0, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class AttentionOptions:
    """Where the decoders of this family differ in attention."""

    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    window: int = 0


class Attention(Module):
    """Grouped-query attention with rotary positions; q_proj, k_proj, v_proj, o_proj."""

    def __init__(self, c: ModelConfig, options: AttentionOptions) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window = options.window
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim, options.qkv_bias)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, options.qkv_bias)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, options.qkv_bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, options.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.eps) if options.head_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.eps) if options.head_norm else None

    def forward(self, x: Tensor, batch: Batch, table: tuple[Tensor, Tensor]) -> Tensor:
        tokens = x.shape[0]
        q = self.q_proj(x).reshape(tokens, self.heads, self.head_dim)
        k = self.k_proj(x).reshape(tokens, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(tokens, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attention(
            rope(q, table), rope(k, table), v, batch.cu_seqlens, scale=self.head_dim**-0.5, window=self.window
        )
        return self.o_proj(out.reshape(tokens, self.heads * self.head_dim))


class MLP(Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, c: ModelConfig, bias: bool) -> None:
        self.gate_proj = Linear(c.hidden, c.intermediate, bias)
        self.up_proj = Linear(c.hidden, c.intermediate, bias)
        self.down_proj = Linear(c.intermediate, c.hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(Module):
    """Pre-norm block: attention, then MLP, each added to the residual stream [T, hidden]."""

    def __init__(self, c: ModelConfig, options: AttentionOptions, mlp_bias: bool = False) -> None:
        self.self_attn = Attention(c, options)
        self.mlp = MLP(c, mlp_bias)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, x: Tensor, batch: Batch, table: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, table)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Module):
    """Embedding, blocks and last norm: ids [T] to hidden states [T, hidden]."""

    def __init__(self, c: ModelConfig, blocks: list[Module]) -> None:
        self.embed_tokens = Embedding(c.vocabulary, c.hidden)
        self.layers = Layers(blocks)
        self.norm = RMSNorm(c.hidden, c.eps)
        self.table = RopeTable(c.raw, c.head_dim)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed_tokens(batch.ids)
        return self.norm(self.layers(x, batch, self.table(batch.positions)))

    def __call__(self, batch: Batch) -> Tensor:
        return self.forward(batch)


class DecoderLM(CausalLM):
    """Decoder with a linear head; ``blocks``: one module a layer (the same object where layers are alike)."""

    def __init__(self, c: ModelConfig, blocks: list[Module]) -> None:
        self.model = Decoder(c, blocks)
        self.lm_head = None if c.tied else Linear(c.hidden, c.vocabulary)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch)

    def head(self, batch: Batch) -> Tensor:
        param = self.model.embed_tokens.table if self.lm_head is None else self.lm_head.weight_param
        return self.weight(batch.ids.graph, param)


def build(config: Mapping[str, Any]) -> CausalLM:
    """Llama of a Hugging Face config."""
    c = ModelConfig.read(config)
    refuse(config, "hidden_act", "silu")
    biased = bool(config.get("attention_bias", False))
    block = DecoderLayer(c, AttentionOptions(qkv_bias=biased, out_bias=biased), bool(config.get("mlp_bias", False)))
    return DecoderLM(c, [block] * c.layers)
