"""A written model is one that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.errors import UserError
from surogate.export.hf import copy_tokenizer_files, write_hf_model
from surogate.export.safetensors_writer import array_tensor
from surogate.io.dtypes import f32_to_bf16

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.io.gguf_samples import write_model  # noqa: E402
from tests.io.test_gguf import TOKENIZER, tiny  # noqa: E402


@pytest.fixture
def base(tmp_path: Path) -> tuple[Any, Path]:
    """A tiny model and the directory in which transformers saved it, with files of a tokenizer."""
    model, directory = tiny("llama"), tmp_path / "base"
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (directory / name).write_text(f'"{name}"')
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.6, "do_sample": true}')
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool.jinja").write_text("x")
    return model, directory


def tensors(model: Any, dtype: str) -> list[Any]:
    arrays = {n: t.numpy() for n, t in model.state_dict().items()}
    return [array_tensor(n, f32_to_bf16(a) if dtype == "bf16" else a, dtype) for n, a in arrays.items()]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shard", [10_000, 1 << 30])
def test_transformers_loads_it_unchanged(base: tuple[Any, Path], dtype: str, shard: int, tmp_path: Path) -> None:
    model, source = base
    config = json.loads((source / "config.json").read_text()) | {"of_the_future": {"kept": True}}
    out = tmp_path / "out"
    write_hf_model(out, config, tensors(model, dtype), source, max_shard_bytes=shard)
    assert (out / "model.safetensors").exists() == (shard > 10_000)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == kind and loaded.generation_config.eos_token_id == [5, 6]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(kind)), name
    written = json.loads((out / "config.json").read_text())
    assert written["of_the_future"] == {"kept": True}
    assert written.get("dtype", written.get("torch_dtype")) == {"f32": "float32", "bf16": "bfloat16"}[dtype]
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    ):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_without_a_source_the_config_says_which_tokens_end(tmp_path: Path) -> None:
    model = tiny("qwen3")
    config = model.config.to_dict() | {"eos_token_id": 3}
    del config["dtype"]
    write_hf_model(tmp_path, config, tensors(model, "bf16"), None)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 3
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_gguf_gives_its_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tiny("llama"), **TOKENIZER)
    out = tmp_path / "out"
    out.mkdir()
    copy_tokenizer_files(tmp_path / "m.gguf", out)
    assert transformers.PreTrainedTokenizerFast.from_pretrained(out)("ab").input_ids == [26]


def test_writing_over_its_own_source_keeps_the_tokenizer(base: tuple[Any, Path]) -> None:
    model, source = base
    config = json.loads((source / "config.json").read_text())
    write_hf_model(source, config, tensors(model, "f32"), source)
    assert (source / "tokenizer.json").read_text() == '"tokenizer.json"'


def test_a_file_in_the_way_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        write_hf_model(tmp_path / "out", {}, [array_tensor("a", np.zeros(1, np.float32))], None)
