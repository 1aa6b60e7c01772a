"""LoRA adapters in PEFT's format.

An adapter is ``adapter_model.safetensors`` with keys ``base_model.model.<path>.lora_A.weight`` and ``lora_B``, and
``adapter_config.json``. Keys of the configuration that only newer versions of PEFT know are left out where they have
their default, because older versions refuse keys that they do not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surogate.errors import UserError
from surogate.export.hf import copy_tokenizer_files
from surogate.io.config_json import read_json
from surogate.io.dtypes import Array
from surogate.io.files import atomic_file, make_directory, write_json
from surogate.io.safetensors_file import SafetensorsFile
from surogate.io.safetensors_writer import array_tensor, write_safetensors
from surogate.io.weights import SafetensorsSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: ``W + scale * B @ A`` for every weight ``<path>.weight``.

    Attributes:
        base_model: what the adapter was trained on, a path or an id on the hub; may be empty.
        tensors: path of the linear layer, such as ``model.layers.0.self_attn.q_proj``, to ``(A[r, in], B[out, r])`` in
            float32.
        config: the whole of ``adapter_config.json``.
    """

    base_model: str
    r: int
    lora_alpha: float
    lora_dropout: float
    use_rslora: bool
    target_modules: list[str]
    tensors: dict[str, tuple[Array, Array]]
    config: dict[str, Any]

    def scale(self, path: str) -> float:
        """Return the factor of ``B @ A``: alpha/r, or alpha/sqrt(r) with rank stabilisation (arXiv 2312.03732)."""
        rank = self.tensors[path][0].shape[0]
        alpha = self.lora_alpha
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                alpha = float(value)
                break
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def write_adapter(
    directory: str | Path,
    *,
    base_model_name_or_path: str,
    r: int,
    lora_alpha: float,
    lora_dropout: float,
    use_rslora: bool,
    target_modules: Sequence[str],
    tensors: Mapping[str, tuple[Array, Array]],
    source_dir: str | Path | None = None,
) -> None:
    """Write an adapter that PEFT and vLLM load.

    Args:
        directory: made if it does not exist.
        base_model_name_or_path: an id on the hub, or a path; one that exists is made absolute, so that the adapter
            finds its base from anywhere.
        r, lora_alpha, lora_dropout, use_rslora: as in PEFT's LoraConfig.
        target_modules: last parts of the names of the adapted layers (``q_proj``), or whole names.
        tensors: path of a layer to ``(A[r, in], B[out, r])``, float32.
        source_dir: the base model's directory or ``.gguf`` file: its tokenizer files are copied beside the adapter.

    Raises:
        UserError: the disk is full or may not be written to.
        ValueError: the shape of a matrix contradicts ``r``.
    """
    directory = Path(directory)
    make_directory(directory)
    described = []
    for path, (a, b) in tensors.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != r or b.shape[1] != r:
            raise ValueError(f"{path}: A {a.shape} and B {b.shape} for rank {r}")
        for matrix, array in (("A", a), ("B", b)):
            if array.dtype != np.float32:
                raise ValueError(f"{path}: lora_{matrix} is {array.dtype}, not float32")
            described.append(array_tensor(f"{_PREFIX}{path}.lora_{matrix}.weight", array))
    local = bool(base_model_name_or_path) and Path(base_model_name_or_path).exists()
    config: dict[str, Any] = {
        "base_model_name_or_path": str(Path(base_model_name_or_path).resolve()) if local else base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(lora_alpha) if float(lora_alpha).is_integer() else lora_alpha,
        "lora_dropout": lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": r,
        "target_modules": sorted(target_modules),
        "task_type": "CAUSAL_LM",
    }
    if use_rslora:  # PEFT >= 0.7
        config["use_rslora"] = True
    if source_dir is not None:
        copy_tokenizer_files(source_dir, directory)
    write_safetensors(directory / WEIGHTS, described)
    _write_card(directory / "README.md", config, local)
    write_json(directory / CONFIG, config)


def _write_card(path: Path, config: dict[str, Any], local: bool) -> None:
    base = config["base_model_name_or_path"]
    known = "" if local else f"base_model: {base}\n"  # on the hub only an id means something
    text = f"""---
{known}library_name: peft
pipeline_tag: text-generation
tags:
- lora
- surogate
---

# LoRA adapter

Trained with Surogate on `{base}`: rank {config["r"]}, alpha {config["lora_alpha"]}, \
on {", ".join(f"`{name}`" for name in config["target_modules"])}.

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/directory")
```
"""
    with atomic_file(path) as file:
        file.write(text.encode())


def read_adapter(directory: str | Path) -> Adapter:
    """Read a LoRA adapter that we or PEFT wrote.

    Raises:
        UserError: files are missing or damaged, a matrix lacks its partner or their ranks differ, or the adapter has
            more than LoRA matrices of linear layers (DoRA, biases, embeddings, whole modules).
    """
    directory = Path(directory)
    config_path, weights_path = directory / CONFIG, directory / WEIGHTS
    if not directory.is_dir() or not config_path.is_file():
        raise UserError(
            "no adapter there",
            where=str(directory),
            expected=f"a directory with {CONFIG} and {WEIGHTS}",
            fix="give the directory that training wrote",
        )
    config = read_json(config_path)
    _refuse_unsupported(config, config_path)
    if not weights_path.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        raise UserError(
            f"the adapter has no {WEIGHTS}" + (", only PyTorch's adapter_model.bin" if pickled else ""),
            where=str(directory),
            expected=WEIGHTS,
            fix="load it with PEFT and save it again" if pickled else "copy the missing file",
        )
    source = SafetensorsSource([SafetensorsFile(weights_path)])
    halves: dict[str, dict[str, Array]] = {}
    for name in source.names():
        match = _KEY.fullmatch(name)
        if not match or len(source.shape(name)) != 2:
            raise UserError(
                f"tensor {name!r} is not a LoRA matrix of a linear layer",
                where=str(weights_path),
                expected="keys base_model.model.<path>.lora_A.weight and lora_B.weight",
            )
        values = np.empty(source.shape(name), np.float32)
        source.read_into(name, values, "f32")
        halves.setdefault(match["path"], {})[match["matrix"]] = values
    tensors: dict[str, tuple[Array, Array]] = {}
    for path, half in halves.items():
        if len(half) != 2:
            raise UserError(f"{path} has only lora_{next(iter(half))}", where=str(weights_path), expected="A and B")
        if half["A"].shape[0] != half["B"].shape[1]:
            raise UserError(
                f"{path}: lora_A is {list(half['A'].shape)}, lora_B {list(half['B'].shape)}",
                where=str(weights_path),
                expected="[r, in] and [out, r]",
            )
        tensors[path] = half["A"], half["B"]
    if not tensors:
        raise UserError("the adapter has no tensors", where=str(weights_path))
    targets = config.get("target_modules") or []
    return Adapter(
        base_model=config.get("base_model_name_or_path") or "",
        r=int(config.get("r", 8)),  # 8: PEFT's default
        lora_alpha=float(config.get("lora_alpha", 8)),
        lora_dropout=float(config.get("lora_dropout", 0.0)),
        use_rslora=bool(config.get("use_rslora", False)),
        target_modules=[targets] if isinstance(targets, str) else list(targets),
        tensors=tensors,
        config=config,
    )


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    """A key that changes what the adapter computes, and that we do not know, must not be passed over."""
    if config.get("peft_type", "LORA") != "LORA":
        raise UserError(f"an adapter of type {config['peft_type']}", where=str(path), expected="LORA")
    for key, neutral in (
        ("bias", ("none",)),
        ("use_dora", (False,)),
        ("lora_bias", (False,)),
        ("fan_in_fan_out", (False,)),
        ("modules_to_save", (None, [])),
        ("layer_replication", (None, [])),
        ("trainable_token_indices", (None, [], {})),
        ("target_parameters", (None, [])),
    ):
        if config.get(key, neutral[0]) not in neutral and config[key] is not None:
            raise UserError(
                f"an adapter with {key} = {config[key]!r}",
                where=str(path),
                expected="plain LoRA of linear layers",
                fix="merge it with PEFT",
            )
