"""GGUF against transformers: weights, configuration and logits of tiny random models, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.errors import UserError
from surogate.io.config_json import read_model_config
from surogate.io.gguf import convert_gguf
from surogate.io.gguf_file import GGUFFile
from surogate.io.gguf_model import llama3_rope_factors
from surogate.io.weights import checkpoint_dtype, open_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from tests.io.gguf_samples import write_model  # noqa: E402

KIND = gguf.GGMLQuantizationType
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [chr(c) for c in range(ord("a"), ord("a") + 26)] + ["ab", "<|end|>"],
    "tokenizer.ggml.token_type": [1] * 27 + [3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 27,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def tiny(model_type: str, **changes: Any) -> Any:
    """A random model with weights away from their trivial values."""
    keys = {
        "vocab_size": 28, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(keys | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def weights(path: Path) -> dict[str, np.ndarray]:
    source = open_weights(path)
    out = {name: np.empty(source.shape(name), np.float32) for name in source.names()}
    for name, array in out.items():
        source.read_into(name, array, "f32")
    return out


MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "rope_theta": 1e5}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-head-dim": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", MODELS)
def test_weights_come_back_exactly_and_the_config_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[case]
    model = tiny(model_type, **changes)
    path = tmp_path / "model.gguf"
    write_model(path, model)
    expected = {n: t.numpy() for n, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = weights(path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)

    config = read_model_config(path)
    assert config["rms_norm_eps"] == 1e-5  # not the neighbour that f32 metadata holds
    again = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k != "torch_dtype"})
    )
    again = again.float().eval()
    again.load_state_dict({n: torch.from_numpy(a) for n, a in found.items()}, strict=not config["tie_word_embeddings"])
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [KIND.Q8_0, KIND.Q4_1, KIND.F16, KIND.BF16])
def test_a_converted_model_is_what_transformers_makes_of_the_file(kind: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    write_model(path, tiny("llama"), kind, **TOKENIZER)
    convert_gguf(path, out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert ours.dtype == torch.bfloat16
    wanted = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    assert ours.generation_config.eos_token_id == 27
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("abba<|end|>").input_ids == [26, 1, 0, 27] and tokenizer.eos_token == "<|end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_dtypes_are_told(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny("qwen2"), KIND.Q8_0)
    source = open_weights(path)
    assert source.dtype("model.layers.1.mlp.up_proj.weight") == "q8_0" and source.dtype("model.norm.weight") == "f32"
    assert checkpoint_dtype(source) == "bf16"


def test_llama3_rope_scaling_is_recovered(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    changes = {"rope_theta": 500000.0, "rope_scaling": dict(scaling), "max_position_embeddings": 131072}
    model = tiny("llama", hidden_size=256, **changes)  # heads of 64
    plain, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    unscaled = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (unscaled / plain.numpy()).astype(np.float32)
    np.testing.assert_allclose(llama3_rope_factors(500000.0, 64, scaling), factors, rtol=1e-5)
    write_model(tmp_path / "a.gguf", model, **{"tensor:rope_freqs.weight": factors})
    assert read_model_config(tmp_path / "a.gguf")["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in open_weights(tmp_path / "a.gguf").names()
    factors[3] += 1
    write_model(tmp_path / "b.gguf", model, **{"tensor:rope_freqs.weight": factors})
    with pytest.raises(UserError, match="rope_freqs.weight are not those of Llama 3"):
        read_model_config(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        (
            {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
             "qwen2.rope.scaling.original_context_length": 32768},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        ({"qwen2.rope.scaling.type": "none"}, None),
    ],
)  # fmt: skip
def test_other_rope_scalings(metadata: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", tiny("qwen2"), **metadata)
    assert read_model_config(tmp_path / "a.gguf")["rope_scaling"] == expected


# -- damage -----------------------------------------------------------------------------------------------------------


def test_truncations_are_found_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny("llama", num_hidden_layers=1), **TOKENIZER)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 997), *range(1, 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError) as error:
            open_weights(path)
        assert "model.gguf" in str(error.value) and "download the file again" in str(error.value)


def header(path: Path, version: int = 3, magic: bytes = b"GGUF", **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, metadata.pop("arch", "llama"))
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    data[:8] = magic + version.to_bytes(4, "little")
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"magic": b"GGML"}, "not a GGUF file"),
        ({"version": 1}, "GGUF version 1"),
        ({"split__count": 2}, "llama-gguf-split --merge"),
        ({"general__alignment": 3}, "a power of two"),
        ({"arch": "gemma2"}, "'gemma2' is not known"),
        ({}, "lacks llama"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
    ],
)
def test_files_that_cannot_be_used(make: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_model_config(header(tmp_path / "x.gguf", **make))


def test_counts_that_lie(tmp_path: Path) -> None:
    """A count of strings far beyond the file must end at its end, not in memory."""
    path = header(tmp_path / "x.gguf")
    data = bytearray(path.read_bytes())
    data[16:24] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="incomplete"):
        GGUFFile(path)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", tiny("llama"), **{"tensor:blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(UserError, match="'blk.0.attn_sinks.weight' has no place"):
        open_weights(tmp_path / "a.gguf")
