"""Writing safetensors, one tensor in memory at a time.

The header needs only dtypes and shapes, so it is written first, and every tensor's bytes are asked for when their turn
comes: a model is never held a second time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surogate.io.dtypes import NUMPY_DTYPES, Array
from surogate.io.files import atomic_file, make_directory, write_json
from surogate.io.weights import INDEX

# (name, dtype, shape, get_bytes): dtype as in `NUMPY_DTYPES`; get_bytes returns the tensor's little-endian bytes, or an
# array that has them.
Tensor = tuple[str, str, Sequence[int], Callable[[], "memoryview | Array"]]
MAX_SHARD_BYTES = int(5e9)


def tensor_bytes(tensor: Tensor) -> int:
    """Return a tensor's size in bytes."""
    _, dtype, shape, _ = tensor
    return math.prod(shape) * NUMPY_DTYPES[dtype].itemsize


def array_tensor(name: str, array: Array, dtype: str | None = None) -> Tensor:
    """Describe an array as a tensor; ``dtype`` where NumPy has no name for it (``"bf16"`` for ``uint16`` bits)."""
    if dtype is None:
        names = {held: name for name, held in NUMPY_DTYPES.items() if name != "bf16"}
        dtype = names[array.dtype.newbyteorder("<")]
    return name, dtype, array.shape, lambda: np.ascontiguousarray(array)


def write_safetensors(path: str | Path, tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one file, atomically.

    Args:
        path: takes the file's place when it is whole.
        tensors: any order; the data are laid out by falling element size, so that every tensor is aligned.
        metadata: ``{"format": "pt"}`` if left out, which transformers asks for.

    Raises:
        UserError: the disk is full or may not be written to.
        ValueError: two tensors have one name, or a tensor's bytes are not as many as its shape says.
    """
    path = Path(path)
    ordered = sorted(tensors, key=lambda tensor: -NUMPY_DTYPES[tensor[1]].itemsize)  # stable
    header: dict[str, Any] = {"__metadata__": dict(metadata if metadata is not None else {"format": "pt"})}
    end = 0
    for tensor in ordered:
        name, dtype, shape, _ = tensor
        if name in header:
            raise ValueError(f"two tensors are named {name!r}")
        begin, end = end, end + tensor_bytes(tensor)
        header[name] = {"dtype": dtype.upper(), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begin aligned
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            data = np.asarray(tensor[3]()).reshape(-1).view(np.uint8)
            if data.nbytes != tensor_bytes(tensor):
                raise ValueError(f"{tensor[0]!r}: {data.nbytes} bytes for {tensor[1]} {list(tensor[2])}")
            file.write(data.data)


def write_sharded(
    directory: str | Path,
    tensors: Iterable[Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the weights of a model as Hugging Face does.

    ``model.safetensors`` if one file of at most ``max_shard_bytes`` holds all, else
    ``model-00001-of-0000N.safetensors`` and so on with ``model.safetensors.index.json``. A tensor is never split.
    Weight files of an earlier save in the directory are removed, so that what is found there is one model.

    Returns:
        The files of weights.

    Raises:
        UserError: the disk is full or may not be written to.
    """
    directory = Path(directory)
    make_directory(directory)
    shards: list[list[Tensor]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        size = tensor_bytes(tensor)
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= size
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(directory / name, shard, metadata)
    if len(shards) == 1:
        (directory / INDEX).unlink(missing_ok=True)
    else:
        weight_map = {tensor[0]: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor_bytes(tensor) for shard in shards for tensor in shard)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for old in directory.glob("model*.safetensors"):
        if old.name not in names and (old.name == "model.safetensors" or "-of-" in old.name):
            old.unlink()
    return [directory / name for name in names]
