"""What a GGUF file calls things, in Hugging Face's words: tensor names, row order, configuration."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from surogate.errors import UserError
from surogate.io.dtypes import Array, bf16_to_f32
from surogate.io.gguf_file import GGUFFile

# GGUF's architecture -> Hugging Face's model_type and class. Mistral is written as `llama` by llama.cpp.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's RoPE scaling: part of the configuration, not a weight


def architecture(file: GGUFFile) -> str:
    """Return ``general.architecture``.

    Raises:
        UserError: it is not one that can be mapped to Hugging Face's names.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UserError(
            f"GGUF architecture {name!r} is not known",
            where=str(file.path),
            expected=", ".join(ARCHITECTURES),
            fix="use the model's Hugging Face directory",
        )
    return name


def tensor_names(file: GGUFFile) -> dict[str, str]:
    """Map Hugging Face's names to the file's, in the file's order.

    Raises:
        UserError: a tensor has no counterpart in the architecture.
    """
    architecture(file)
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        match = _NAME.fullmatch(name)
        table = _BLOCK if match and match["layer"] is not None else _TOP
        if not match or match["stem"] not in table:
            raise UserError(
                f"tensor {name!r} has no place in the architecture",
                where=str(file.path),
                fix="use the model's Hugging Face directory",
            )
        prefix = f"model.layers.{match['layer']}." if match["layer"] is not None else ""
        names[f"{prefix}{table[match['stem']]}.{match['kind']}"] = name
    return names


def permuted_heads(file: GGUFFile, name: str) -> int:
    """Return the number of heads whose rows llama.cpp reordered in this tensor of the file, or 0.

    For the architecture ``llama`` the rows of q and k are interleaved within a head, (0, C/2, 1, C/2+1, ...), because
    llama.cpp rotates neighbouring pairs where Hugging Face rotates halves.
    """
    if architecture(file) != "llama":
        return 0
    match = _NAME.fullmatch(name)
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(match["stem"] if match else "")
    if heads is None:
        return 0
    count = file.metadata.get(f"llama.attention.{heads}", file.metadata.get("llama.attention.head_count", 0))
    count = int(count[0] if isinstance(count, list) else count)
    if count < 1 or math.prod(file.tensors[name].shape) % (2 * count):
        raise UserError(f"{name} cannot be divided among {count} heads", where=str(file.path), fix="use another file")
    return count


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Derive the content of ``config.json`` from a file's metadata.

    Raises:
        UserError: an unknown architecture, a missing key, or a RoPE scaling that cannot be expressed.
    """
    arch = architecture(file)
    model_type, cls = ARCHITECTURES[arch]

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise UserError(f"the metadata lacks {arch}.{key}", where=str(file.path), fix="download the file again")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(
                    f"{arch}.{key} differs from layer to layer",
                    where=str(file.path),
                    expected="one value for all layers",
                    fix="use the model's Hugging Face directory",
                )
            value = value[0]
        return value

    if int(get("expert_count", 0)):
        raise UserError("a mixture-of-experts model", where=str(file.path), expected="a dense model")
    names = tensor_names(file)
    hidden, heads = int(get("embedding_length")), int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise UserError("RoPE covers only part of a head", where=str(file.path), fix="use another model")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    vocabulary = embedding.rows if embedding else len(tokens or ())
    config: dict[str, Any] = {
        "architectures": [cls],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, arch),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
    }
    if arch == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in names
    elif arch == "qwen3":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
    for key, source in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.metadata.get(f"tokenizer.ggml.{source}_token_id")
        if token is not None:
            config[f"{key}_token_id"] = int(token)
    return config


def _shortest(value: Any) -> float:
    """Metadata holds f32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    kind = str(file.metadata.get(f"{arch}.rope.scaling.type", "none"))
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, arch)
    if kind in ("none", ""):
        return None
    factor = _shortest(file.metadata.get(f"{arch}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        original = file.metadata.get(f"{arch}.rope.scaling.original_context_length")
        return scaling if original is None else scaling | {"original_max_position_embeddings": int(original)}
    raise UserError(
        f"RoPE scaling of type {kind!r}",
        where=str(file.path),
        expected="none, linear, yarn or Llama 3's",
        fix="use the model's Hugging Face directory",
    )


def _llama3_scaling(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Find the parameters of Llama 3's RoPE scaling from the factors per frequency, which is all that the file keeps.

    Every release so far has low_freq_factor 1, high_freq_factor 4, original context 8192 and factor 8 or 32; the factor
    is the largest of the tensor, and the whole tensor must come out again.
    """
    parts = [bf16_to_f32(v) if d == "bf16" else v.astype(np.float64) for v, d in file.slices(ROPE_FACTORS, 1)]
    stored = np.concatenate(parts).reshape(-1)
    theta = float(file.metadata.get(f"{arch}.rope.freq_base", 10000.0))
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(stored, llama3_rope_factors(theta, 2 * stored.size, scaling), rtol=1e-4):
        raise UserError(
            "the factors in rope_freqs.weight are not those of Llama 3's RoPE scaling",
            where=str(file.path),
            fix="use the model's Hugging Face directory",
        )
    return scaling


def llama3_rope_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> Array:
    """Return by what Llama 3's scaling divides each of the ``head_dim/2`` rotary frequencies (float64).

    Wavelengths beyond ``original/low_freq_factor`` are divided by ``factor``, those below
    ``original/high_freq_factor`` are kept, and in between the frequency is interpolated (Llama 3.1 reference code).
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    factors: Array = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors
