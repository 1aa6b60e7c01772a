"""Adapters against PEFT: it loads ours, we read its, and merging agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.errors import UserError
from surogate.export.merge import merge_adapter
from surogate.export.peft import CONFIG, WEIGHTS, read_adapter, write_adapter
from surogate.export.safetensors_writer import array_tensor, write_safetensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.io.gguf_samples import write_model  # noqa: E402
from tests.io.test_gguf import TOKENIZER, tiny  # noqa: E402

IDS = torch.arange(20)[None]
# What PEFT 0.4 (2023), the oldest with all we need, accepts in adapter_config.json.
OLD_KEYS = {
    "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r",
    "revision", "target_modules", "task_type",
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> tuple[Any, Path]:
    model = tiny("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "base")
    return model, tmp_path / "base"


def matrices(model: Any, targets: list[str], r: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.standard_normal((r, module.in_features)).astype(np.float32) * 0.3,
            rng.standard_normal((module.out_features, r)).astype(np.float32) * 0.3,
        )
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in targets
    }


def write(directory: Path, model: Any, base: Path, targets: list[str], **changes: Any) -> dict[str, Any]:
    options = {"r": 4, "lora_alpha": 6.0, "lora_dropout": 0.1, "use_rslora": False} | changes
    tensors = matrices(model, targets, int(options["r"]))
    write_adapter(directory, base_model_name_or_path=str(base), target_modules=targets, tensors=tensors, **options)
    return tensors


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(IDS).logits


def with_adapter(model: Any, tensors: Any, scale: float) -> Any:
    """The definition: W + scale B A."""
    state = model.state_dict()
    for path, (a, b) in tensors.items():
        state[f"{path}.weight"] += scale * torch.from_numpy(b) @ torch.from_numpy(a)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_ours(base: tuple[Any, Path], rslora: bool, tmp_path: Path) -> None:
    model, directory = base
    tensors = write(tmp_path / "a", model, directory, ["q_proj", "down_proj"], use_rslora=rslora)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a")
    scale = 6 / (2 if rslora else 4)
    torch.testing.assert_close(logits(loaded), logits(with_adapter(model, tensors, scale)), rtol=1e-5, atol=1e-5)
    assert loaded.peft_config["default"].lora_dropout == 0.1
    keys = set(json.loads((tmp_path / "a" / CONFIG).read_text()))
    assert keys - OLD_KEYS == ({"use_rslora"} if rslora else set())
    assert "library_name: peft" in (tmp_path / "a" / "README.md").read_text()


def test_the_base_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny("llama")
    model.save_pretrained("base")
    write(tmp_path / "a", model, Path("base"), ["q_proj"])
    assert read_adapter(tmp_path / "a").base_model == str(tmp_path / "base")
    write(tmp_path / "b", model, Path("owner/name"), ["q_proj"])
    assert read_adapter(tmp_path / "b").base_model == "owner/name"
    assert "base_model: owner/name" in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.parametrize("rslora", [False, True])
def test_we_read_and_merge_what_peft_saves(base: tuple[Any, Path], rslora: bool, tmp_path: Path) -> None:
    _, directory = base
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=rslora, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False,
        alpha_pattern={"v_proj": 3}, rank_pattern={"gate_proj": 2}, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(directory), config)
    model.save_pretrained(tmp_path / "a")
    adapter = read_adapter(tmp_path / "a")
    assert adapter.base_model == str(directory) and adapter.use_rslora is rslora and len(adapter.tensors) == 6
    merge_adapter(None, tmp_path / "a", tmp_path / "merged")  # the base is the one that the adapter names
    wanted = model.merge_and_unload().state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-6)


def test_the_sum_is_rounded_once(base: tuple[Any, Path], tmp_path: Path) -> None:
    """bf16 base: the merged weight is the bf16 nearest to the sum in f32."""
    model, directory = base
    model.bfloat16().save_pretrained(directory)
    tensors = write(tmp_path / "a", model, directory, ["o_proj"])
    merge_adapter(directory, tmp_path / "a", tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.dtype == torch.bfloat16
    exact = with_adapter(model.double(), {p: (a.astype(float), b.astype(float)) for p, (a, b) in tensors.items()}, 1.5)
    for name, tensor in loaded.state_dict().items():
        nearest = exact.state_dict()[name].float().bfloat16()
        assert (tensor != nearest).float().mean() < 0.01, name  # a sum in f32 may fall on the other side of a tie
        torch.testing.assert_close(tensor, nearest, rtol=2**-7, atol=0)
    merge_adapter(directory, tmp_path / "a", tmp_path / "wide", dtype="f32")
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.dtype == torch.float32
    for name, tensor in wide.state_dict().items():
        torch.testing.assert_close(tensor, exact.state_dict()[name].float(), rtol=1e-5, atol=1e-6)


def test_f16(base: tuple[Any, Path], tmp_path: Path) -> None:
    model, directory = base
    model.half().save_pretrained(directory)
    tensors = write(tmp_path / "a", model, directory, ["o_proj"])
    merge_adapter(directory, tmp_path / "a", tmp_path / "merged")  # an f16 base stays f16
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.dtype == torch.float16
    exact = with_adapter(model.float(), tensors, 1.5)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor.float(), exact.state_dict()[name], rtol=2**-10, atol=1e-6)
    write(tmp_path / "b", model, directory, ["o_proj"], lora_alpha=1e6)
    with pytest.raises(UserError, match="beyond the range of float16"):
        merge_adapter(directory, tmp_path / "b", tmp_path / "huge")
    with pytest.raises(UserError, match="float32, bfloat16 or float16"):
        merge_adapter(directory, tmp_path / "a", tmp_path / "x", dtype="int8")


def test_a_tied_head_parts_from_the_embedding(tmp_path: Path) -> None:
    model = tiny("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tensors = write(tmp_path / "a", model, tmp_path / "base", ["lm_head"])
    merge_adapter(tmp_path / "base", tmp_path / "a", tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    embedding = model.state_dict()["model.embed_tokens.weight"].clone()
    assert torch.equal(loaded.state_dict()["model.embed_tokens.weight"], embedding)
    a, b = (torch.from_numpy(m) for m in tensors["lm_head"])
    torch.testing.assert_close(loaded.state_dict()["lm_head.weight"], embedding + 1.5 * b @ a)


def test_a_gguf_base(tmp_path: Path) -> None:
    model = tiny("llama")
    write_model(tmp_path / "base.gguf", model, **TOKENIZER)
    tensors = write(tmp_path / "a", model, tmp_path / "base.gguf", ["q_proj", "k_proj"])
    merge_adapter(None, tmp_path / "a", tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), logits(with_adapter(model, tensors, 1.5)), rtol=1e-5, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")("ab").input_ids == [26]


def test_what_does_not_fit_is_said(base: tuple[Any, Path], tmp_path: Path) -> None:
    model, directory = base
    write(tmp_path / "a", model, directory, ["q_proj"])
    tiny("llama", hidden_size=32).save_pretrained(tmp_path / "narrow")
    with pytest.raises(UserError, match=r"q_proj.weight is \[32, 32\] in the base model") as error:
        merge_adapter(tmp_path / "narrow", tmp_path / "a", tmp_path / "out")
    assert "[64, 64]" in str(error.value)
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    with pytest.raises(UserError, match="layers.1.self_attn.q_proj.weight, which the base model lacks"):
        merge_adapter(tmp_path / "shallow", tmp_path / "a", tmp_path / "out")
    for out in (directory, tmp_path / "a"):
        with pytest.raises(UserError, match="would replace"):
            merge_adapter(directory, tmp_path / "a", out)
    assert not (tmp_path / "out").exists()


def edit(directory: Path, **changes: Any) -> None:
    document = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(document | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"base_model_name_or_path": None}, "does not say which model"),
    ],
)
def test_adapters_that_cannot_be_merged(
    base: tuple[Any, Path], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, directory = base
    write(tmp_path / "a", model, directory, ["q_proj"])
    edit(tmp_path / "a", **changes)
    with pytest.raises(UserError, match=message):
        merge_adapter(None, tmp_path / "a", tmp_path / "out")


def test_damaged_adapters(base: tuple[Any, Path], tmp_path: Path) -> None:
    model, directory = base
    with pytest.raises(UserError, match="no adapter there"):
        read_adapter(directory)
    write(tmp_path / "a", model, directory, ["q_proj"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    a, b = np.zeros((4, 64), np.float32), np.zeros((64, 2), np.float32)
    for tensors, message in (
        ({name.format("A"): a}, "has only lora_A"),
        ({name.format("A"): a, name.format("B"): b}, r"lora_A is \[4, 64\], lora_B \[64, 2\]"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": a}, "not a LoRA matrix"),
        ({}, "no tensors"),
    ):
        write_safetensors(tmp_path / "a" / WEIGHTS, [array_tensor(n, t) for n, t in tensors.items()])
        with pytest.raises(UserError, match=message):
            read_adapter(tmp_path / "a")
    (tmp_path / "a" / WEIGHTS).write_bytes((tmp_path / "a" / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(UserError, match="incomplete"):
        read_adapter(tmp_path / "a")
    (tmp_path / "a" / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"no {WEIGHTS}"):
        read_adapter(tmp_path / "a")


def test_shapes_that_contradict_the_rank_are_our_fault(tmp_path: Path) -> None:
    a, b = np.zeros((4, 8), np.float32), np.zeros((8, 4), np.float32)
    options: dict[str, Any] = {
        "base_model_name_or_path": "x", "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False,
        "target_modules": ["q_proj"],
    }  # fmt: skip
    with pytest.raises(ValueError, match="for rank 2"):
        write_adapter(tmp_path, r=2, tensors={"q_proj": (a, b)}, **options)
    with pytest.raises(ValueError, match="float64"):
        write_adapter(tmp_path, r=4, tensors={"q_proj": (a.astype(float), b)}, **options)
