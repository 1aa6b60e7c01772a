"""A model as a Hugging Face directory: what transformers and vLLM load unchanged."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surogate.io.files import disk_errors, make_directory, write_json
from surogate.io.gguf import generation_config
from surogate.io.gguf_file import GGUFFile
from surogate.io.gguf_tokenizer import write_tokenizer_files
from surogate.io.safetensors_writer import MAX_SHARD_BYTES, Tensor, tensor_bytes, write_sharded

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
)
_TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def copy_tokenizer_files(source: str | Path, directory: str | Path) -> None:
    """Copy the tokenizer and its chat template, byte for byte.

    Args:
        source: a Hugging Face directory (files that it lacks are passed over), or a ``.gguf`` file, whose tokenizer is
            written as such files.
        directory: exists.
    """
    source, directory = Path(source), Path(directory)
    with disk_errors(directory):
        if source.is_file() and source.suffix == ".gguf":
            write_tokenizer_files(GGUFFile(source), directory)
            return
        for name in TOKENIZER_FILES:
            _copy(source / name, directory / name)
        extra = source / "additional_chat_templates"
        if extra.is_dir() and source.resolve() != directory.resolve():
            shutil.copytree(extra, directory / extra.name, dirs_exist_ok=True)


def write_hf_model(
    directory: str | Path,
    config: dict[str, Any],
    tensors: Iterable[Tensor],
    source_dir: str | Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model: ``config.json``, ``generation_config.json``, tokenizer, chat template, weights.

    Args:
        directory: made if it does not exist; weights that are there are replaced.
        config: the content of ``config.json``. All keys are kept; its dtype becomes that of most of the weights.
        tensors: the weights under Hugging Face's names, each asked for once, one after the other.
        source_dir: the directory (or ``.gguf`` file) that the model came from: tokenizer files are copied, and
            ``generation_config.json`` if it has one. None: no tokenizer.
        max_shard_bytes: above this the weights are split over several files.

    Raises:
        UserError: the disk is full or may not be written to.
    """
    directory = Path(directory)
    make_directory(directory)
    tensors = list(tensors)
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor[1]] += tensor_bytes(tensor)
    config = dict(config)
    if sizes:
        dtype = _TORCH_DTYPES.get(sizes.most_common(1)[0][0], "float32")
        # transformers 5 writes `dtype` and reads both; older versions know `torch_dtype` only.
        for key in [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]:
            config[key] = dtype
    if source_dir is not None:
        copy_tokenizer_files(source_dir, directory)
    generation = Path(source_dir) / "generation_config.json" if source_dir is not None else None
    if generation is not None and generation.is_file():
        with disk_errors(directory):
            _copy(generation, directory / generation.name)
    else:
        write_json(directory / "generation_config.json", generation_config(config))
    write_sharded(directory, tensors, max_shard_bytes)
    write_json(directory / "config.json", config)  # last: a directory with it is whole


def _copy(source: Path, destination: Path) -> None:
    if source.is_file() and source.resolve() != destination.resolve():
        shutil.copyfile(source, destination)
