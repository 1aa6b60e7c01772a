"""An adapter folded into its base model: ``W + scale * B @ A``, tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from surogate.errors import UserError
from surogate.export.hf import write_hf_model
from surogate.export.peft import CONFIG, Adapter, read_adapter
from surogate.io.config_json import read_model_config
from surogate.io.dtypes import NUMPY_DTYPES, SLICE, Array, f32_to_bf16
from surogate.io.files import check_free_space, make_directory
from surogate.io.hub import resolve_model
from surogate.io.safetensors_writer import Tensor
from surogate.io.weights import WeightSource, checkpoint_dtype, open_weights, stored_dtype

_DTYPES = {"f32": "f32", "bf16": "bf16", "f16": "f16", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def merge_adapter(
    base_dir: str | Path | None, adapter_dir: str | Path, out_dir: str | Path, dtype: str | None = None
) -> Path:
    """Write base model + adapter as one Hugging Face model.

    The sum is taken in float32 and rounded once. One tensor is in memory at a time.

    Args:
        base_dir: directory, ``.gguf`` file or id on the hub of the base model; None: the one that the adapter names.
        adapter_dir: a LoRA adapter in PEFT's format.
        out_dir: made if it does not exist; neither of the other two.
        dtype: what the weights are stored as, ``f32``, ``bf16`` or ``f16`` (or PyTorch's name for it); None: what most
            of the base's are, bf16 for a quantised one.

    Returns:
        ``out_dir``.

    Raises:
        UserError: a file is missing or damaged, the adapter does not fit the base, a weight is beyond the range of f16,
            or the disk is too small.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"is {dtype!r}", where="dtype", expected="float32, bfloat16 or float16")
    adapter = read_adapter(adapter_dir)
    if base_dir is None and not adapter.base_model:
        raise UserError(
            "the adapter does not say which model it was trained on",
            where=str(Path(adapter_dir) / CONFIG),
            fix="name the base model",
        )
    base, out_dir = resolve_model(str(base_dir if base_dir is not None else adapter.base_model)), Path(out_dir)
    if out_dir.resolve() in (base.resolve(), Path(adapter_dir).resolve()):
        raise UserError("the output would replace what it is made from", where=str(out_dir), fix="name a new directory")
    source, config = open_weights(base), read_model_config(base)
    if dtype is not None:
        stored = _DTYPES[dtype]
    else:
        stored = "f16" if stored_dtype(source) == "f16" else checkpoint_dtype(source)
    names = source.names()
    if "lm_head" in adapter.tensors and _HEAD not in names and _EMBEDDING in names:
        # The head shares the embedding's storage and only the head was adapted: they part.
        config["tie_word_embeddings"] = False
        names.append(_HEAD)
    _check_fit(adapter, source, names, base)
    make_directory(out_dir)
    check_free_space(out_dir, sum(math.prod(_shape(source, name)) for name in names) * NUMPY_DTYPES[stored].itemsize)
    write_hf_model(out_dir, config, [_merged(source, name, adapter, stored) for name in names], base)
    return out_dir


def _origin(source: WeightSource, name: str) -> str:
    """The name under which the base stores a weight; only an untied head differs."""
    return _EMBEDDING if name == _HEAD and _HEAD not in source.names() else name


def _shape(source: WeightSource, name: str) -> tuple[int, ...]:
    return source.shape(_origin(source, name))


def _check_fit(adapter: Adapter, source: WeightSource, names: list[str], base: Path) -> None:
    known = set(names)
    for path, (a, b) in adapter.tensors.items():
        name = f"{path}.weight"
        if name not in known:
            raise UserError(
                f"the adapter changes {name}, which the base model lacks",
                where=str(base),
                fix="name the model that the adapter was trained on",
            )
        expected, found = (b.shape[0], a.shape[1]), _shape(source, name)
        if found != expected:
            raise UserError(
                f"{name} is {list(found)} in the base model",
                where=str(base),
                expected=f"{list(expected)}, as in the adapter",
                fix="name the model that the adapter was trained on",
            )


def _merged(source: WeightSource, name: str, adapter: Adapter, dtype: str) -> Tensor:
    shape, origin, path = _shape(source, name), _origin(source, name), name.removesuffix(".weight")

    def read() -> Array:
        if path not in adapter.tensors and dtype == "bf16":
            bits = np.empty(shape, np.uint16)
            source.read_into(origin, bits, "bf16")
            return bits
        weight = np.empty(shape, np.float32)
        source.read_into(origin, weight, "f32")
        if path in adapter.tensors:
            a, b = adapter.tensors[path]
            b = b * np.float32(adapter.scale(path))
            step = max(1, SLICE // shape[1])
            for row in range(0, shape[0], step):
                weight[row : row + step] += b[row : row + step] @ a
        if dtype == "bf16":
            return f32_to_bf16(weight)
        return _to_f16(weight, name) if dtype == "f16" else weight

    return name, dtype, shape, read


def _to_f16(weight: Array, name: str) -> Array:
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16)
    if np.isinf(half).any() and not np.isinf(weight).any():
        raise UserError(f"{name} has values beyond the range of float16", expected="at most 65504", fix="use bfloat16")
    return half
