"""Named weights of a model, copied into place one slice at a time.

>>> source = open_weights(path)
>>> source.read_into("model.norm.weight", arena_view, "f32")

Files are memory-mapped and the pages behind a reader are given back at once, so that a load adds a few megabytes to
the resident size of the process, whatever the size of the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from surogate.errors import UserError
from surogate.io.config_json import read_json
from surogate.io.dtypes import FLOAT_DTYPES, SLICE, TARGET_BYTES, Array, TargetDType, convert_into
from surogate.io.gguf_file import GGUFFile
from surogate.io.gguf_model import permuted_heads, tensor_names
from surogate.io.mapped import broken
from surogate.io.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Where weights come from. Names are Hugging Face's."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; KeyError if there is none of that name."""
        ...

    def dtype(self, name: str) -> str:
        """Return how a tensor is stored: ``f32 bf16 f16 f64``, or another lower-case name if it is quantised."""
        ...

    def read_into(self, name: str, destination: Array, dtype: TargetDType) -> None:
        """Copy a tensor to ``destination``, converted to ``dtype`` (to nearest, ties to even).

        Args:
            name: one of :meth:`names`.
            destination: C-contiguous, as many elements as the tensor: ``uint8`` bytes, or ``float32`` for ``"f32"`` and
                ``uint16`` (bits) for ``"bf16"``.
            dtype: what to store.

        Raises:
            UserError: the tensor is stored in a dtype that is not a float.
            ValueError: the destination does not fit.
        """
        ...


def flat_target(destination: Array, elements: int, dtype: TargetDType) -> Array:
    """Return ``destination`` as a flat ``float32`` or ``uint16`` view, or raise ValueError if it does not fit."""
    nbytes = elements * TARGET_BYTES[dtype]
    if destination.nbytes != nbytes or not destination.flags.c_contiguous:
        raise ValueError(f"destination of {destination.nbytes} bytes for {nbytes} bytes of {dtype}, contiguous")
    return destination.reshape(-1).view(np.float32 if dtype == "f32" else np.uint16)


class SafetensorsSource:
    """The tensors of one or several safetensors files."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.entries:
                if name in self._files:
                    raise broken(file.path, f"tensor {name!r} is also in {self._files[name].path.name}")
                self._files[name] = file

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> str:
        return self._files[name].entries[name].dtype

    def read_into(self, name: str, destination: Array, dtype: TargetDType) -> None:
        file, stored = self._files[name], self.dtype(name)
        if stored not in FLOAT_DTYPES:
            raise UserError(
                f"tensor {name!r} is stored as {stored.upper()}",
                where=str(file.path),
                expected="F32, BF16, F16 or F64",
                fix="use the unquantised model",
            )
        target = flat_target(destination, math.prod(self.shape(name)), dtype)
        start = 0
        for part in file.slices(name, 8 * SLICE):
            convert_into(part, stored, target[start : start + part.size], dtype)
            start += part.size


class GGUFSource:
    """The tensors of a GGUF file, dequantised, under Hugging Face's names and in Hugging Face's row order."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._names = tensor_names(file)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def dtype(self, name: str) -> str:
        return self._file.tensors[self._names[name]].kind

    def read_into(self, name: str, destination: Array, dtype: TargetDType) -> None:
        tensor = self._file.tensors[self._names[name]]
        target = flat_target(destination, math.prod(tensor.shape), dtype)
        start = 0
        for values, stored in self._slices(self._names[name]):
            part = values.reshape(-1)
            convert_into(part, stored, target[start : start + part.size], dtype)
            start += part.size

    def _slices(self, name: str) -> Iterator[tuple[Array, str]]:
        tensor = self._file.tensors[name]
        heads = permuted_heads(self._file, name)
        if not heads:
            yield from self._file.slices(name, max(1, SLICE // tensor.columns))
        elif len(tensor.shape) == 1:  # a bias: one row, all heads in it
            for values, stored in self._file.slices(name, 1):
                yield values.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1), stored
        else:  # head by head: row 2i + j of the file is row j * C/2 + i of Hugging Face's
            for values, stored in self._file.slices(name, tensor.rows // heads):
                yield values.reshape(-1, 2, tensor.columns).swapaxes(0, 1).reshape(-1, tensor.columns), stored


def open_weights(path: str | Path) -> WeightSource:
    """Open the weights of a model.

    Args:
        path: a directory with ``model.safetensors``, or with shards and ``model.safetensors.index.json``; or a
            ``.safetensors`` or ``.gguf`` file.

    Raises:
        UserError: nothing there that can be read, or a file is damaged (the message names file and bytes).
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFSource(GGUFFile(path))
        if path.suffix == ".safetensors":
            return SafetensorsSource([SafetensorsFile(path)])
        raise UserError("not a file of weights", where=str(path), expected="a .safetensors or .gguf file")
    if not path.is_dir():
        raise UserError("no such model", where=str(path), fix="check the path")
    if (path / INDEX).is_file():
        return _open_sharded(path)
    if (path / "model.safetensors").is_file():
        return SafetensorsSource([SafetensorsFile(path / "model.safetensors")])
    raise _no_weights(path)


def _open_sharded(directory: Path) -> WeightSource:
    index = directory / INDEX
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(shard, str) for shard in mapping.values()):
        raise broken(index, "no weight_map", "an object from tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in dict.fromkeys(mapping.values()):
        if Path(shard).name != shard:
            raise broken(index, f"shard {shard!r} lies outside the directory", "a plain file name")
        if not (directory / shard).is_file():
            count = len(set(mapping.values()))
            raise UserError(
                f"the index names {shard}, which does not exist",
                where=str(index),
                expected=f"{count} shards",
                fix="download the missing file",
            )
        files[shard] = SafetensorsFile(directory / shard)
    for name, shard in mapping.items():
        if name not in files[shard].entries:
            raise broken(index, f"the index places tensor {name!r} in {shard}, which lacks it")
    return SafetensorsSource(list(files.values()))


def _no_weights(directory: Path) -> UserError:
    expected = f"model.safetensors, or shards with {INDEX}"
    found = sorted(file.name for file in directory.iterdir() if file.is_file())
    pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    shards = [name for name in found if name.endswith(".safetensors")]
    if any(name.endswith(".gguf") for name in found):
        one = next(name for name in found if name.endswith(".gguf"))
        return UserError(
            "the directory holds GGUF files only",
            where=str(directory),
            expected=expected,
            fix=f"name the file itself: {directory / one}",
        )
    if "adapter_config.json" in found:
        return UserError(
            "the directory holds an adapter, not a model",
            where=str(directory),
            expected=expected,
            fix="merge it into its base model first: surogate merge",
        )
    if shards:
        return UserError(
            f"safetensors files ({', '.join(shards[:3])}) without an index",
            where=str(directory),
            expected=expected,
            fix=f"download {INDEX} too",
        )
    if pickled:
        return UserError(
            f"weights in PyTorch's pickle format only ({pickled[0]})",
            where=str(directory),
            expected=expected,
            fix="convert them once with transformers: "
            "AutoModelForCausalLM.from_pretrained(directory).save_pretrained(new_directory)",
        )
    return UserError("the directory has no weights", where=str(directory), expected=expected, fix="check the path")


def stored_dtype(source: WeightSource) -> str:
    """Return the dtype in which most of a model's elements are stored, in the words of :meth:`WeightSource.dtype`."""
    elements: Counter[str] = Counter()
    for name in source.names():
        elements[source.dtype(name)] += math.prod(source.shape(name))
    return elements.most_common(1)[0][0] if elements else "f32"


def checkpoint_dtype(source: WeightSource) -> TargetDType:
    """Return what to keep a model in: ``f32`` if most of its elements are stored as f32 or f64, else ``bf16``."""
    return "f32" if stored_dtype(source) in ("f32", "f64") else "bf16"
