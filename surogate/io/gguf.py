"""From a GGUF file to a Hugging Face directory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from surogate.io.dtypes import Array
from surogate.io.files import make_directory, write_json
from surogate.io.gguf_file import GGUFFile
from surogate.io.gguf_model import model_config
from surogate.io.gguf_tokenizer import write_tokenizer_files
from surogate.io.safetensors_writer import Tensor, write_sharded
from surogate.io.weights import GGUFSource, WeightSource


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Derive ``generation_config.json`` from ``config.json``: which tokens begin, end and pad."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True} | {key: config[key] for key in keys if key in config}


def convert_gguf(gguf_path: str | Path, out_dir: str | Path) -> None:
    """Write a GGUF model as a Hugging Face directory: bf16 safetensors, configuration, tokenizer, chat template.

    Architectures: ``llama`` (with Mistral), ``qwen2``, ``qwen3``. Quantised tensors are dequantised, then rounded.

    Raises:
        UserError: the file is damaged, or its architecture, quantisation or tokenizer is not known.
    """
    file = GGUFFile(gguf_path)
    out_dir = Path(out_dir)
    make_directory(out_dir)
    config = model_config(file)
    write_tokenizer_files(file, out_dir)
    write_json(out_dir / "generation_config.json", generation_config(config))
    source = GGUFSource(file)
    write_sharded(out_dir, [bf16_tensor(source, name) for name in source.names()])
    write_json(out_dir / "config.json", config)  # last: a directory with it is whole


def bf16_tensor(source: WeightSource, name: str) -> Tensor:
    """Describe a tensor of a source, to be written as bf16."""
    shape = source.shape(name)

    def read() -> Array:
        values = np.empty(math.prod(shape), np.uint16)
        source.read_into(name, values, "bf16")
        return values

    return name, "bf16", shape, read
