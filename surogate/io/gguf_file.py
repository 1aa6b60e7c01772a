"""One GGUF file: metadata and the table of tensors, checked against the file's size.

The ``gguf`` package has a reader too, but it keeps several NumPy arrays for every string of the vocabulary (2 s and
200 MB for 49,152 tokens) and does not check a file's size, so the header is read here and only the block formats of
quantised tensors are the package's. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surogate.errors import UserError
from surogate.io.dtypes import Array
from surogate.io.mapped import MappedFile, broken, truncated

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# GGML type -> stored as these dtypes, no blocks
_PLAIN = {0: "f32", 1: "f16", 28: "f64", 30: "bf16"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a file. ``shape`` is row-major (GGML writes it reversed); ``kind`` is the lower-case GGML type."""

    kind: str
    type_id: int
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // max(self.rows, 1)


class GGUFFile:
    """A validated GGUF file (version 2 or 3, little-endian, one part).

    Attributes:
        metadata: key to value; arrays are lists.
        tensors: name to :class:`GGUFTensor`.

    Raises:
        UserError: not a GGUF file, truncated, split into parts, or of an unknown quantisation.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        self._position = 0
        if self._take(4) != b"GGUF":
            raise broken(self.path, "the file does not start with 'GGUF', so it is not a GGUF file")
        version, tensors, keys = self._unpack("I"), 0, 0
        if version not in (2, 3):
            raise UserError(
                f"GGUF version {version}",
                where=str(self.path),
                expected="version 2 or 3, little-endian",
                fix="convert the model again with a current llama.cpp",
            )
        tensors, keys = self._unpack("Q"), self._unpack("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in self.metadata:
                raise broken(self.path, f"the metadata names {key!r} twice")
            self.metadata[key] = self._value(self._unpack("I"))
        if int(self.metadata.get("split.count", 1)) > 1:
            raise UserError(
                "one part of a model that is split over several GGUF files",
                where=str(self.path),
                expected="a single file",
                fix="join the parts with `llama-gguf-split --merge`",
            )
        self.tensors = self._table(tensors)
        self._file.release(0, self._position)

    def _take(self, nbytes: int) -> bytes:
        end = self._position + nbytes
        if end > self._file.size:
            raise truncated(self.path, self._file.size, end, "header")
        data = self._file.map[self._position : end]
        self._position = end
        return data

    def _unpack(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._take(size))[0]

    def _string(self) -> str:
        return self._take(self._unpack("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("I"), self._unpack("Q")
            if item in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[item])
                return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
            if item in (_STRING, _ARRAY):
                return [self._value(item) for _ in range(count)]
        raise broken(self.path, f"the metadata holds a value of unknown type {kind}")

    def _table(self, count: int) -> dict[str, GGUFTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        records: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, rank = self._string(), self._unpack("I")
            if not 1 <= rank <= 4:
                raise broken(self.path, f"tensor {name!r} has {rank} dimensions", "1 to 4")
            shape = tuple(self._unpack("Q") for _ in range(rank))[::-1]
            records.append((name, shape, self._unpack("I"), self._unpack("Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1 or alignment & (alignment - 1):
            raise broken(self.path, f"general.alignment is {alignment}", "a power of two")
        data_start = -(-self._position // alignment) * alignment
        table: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in records:
            try:
                kind = GGMLQuantizationType(type_id)
            except ValueError:
                raise broken(self.path, f"tensor {name!r} has the unknown GGML type {type_id}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                expected = f"a multiple of {block} for {kind.name}"
                raise broken(self.path, f"tensor {name!r} has rows of {shape[-1]}", expected)
            if name in table:
                raise broken(self.path, f"tensor {name!r} appears twice")
            nbytes = math.prod(shape) // block * block_bytes
            stored = _PLAIN.get(type_id, kind.name.lower())
            table[name] = GGUFTensor(stored, type_id, shape, data_start + offset, nbytes)
        end = max((t.start + t.nbytes for t in table.values()), default=self._position)
        if end > self._file.size:
            raise truncated(self.path, self._file.size, end)
        return table

    def slices(self, name: str, rows: int) -> Iterator[tuple[Array, str]]:
        """Yield ``rows`` rows of a tensor at a time, as ``(values, dtype)`` with values of shape [rows, columns].

        A tensor stored as f32, f16, f64 or bf16 (``uint16`` bits) comes as it is, a quantised one as f32. The pages of
        each slice are let go of after it is used.

        Raises:
            UserError: the ``gguf`` package cannot dequantise this type.
        """
        import gguf

        tensor = self.tensors[name]
        plain = _PLAIN.get(tensor.type_id)
        view = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "bf16": "<u2"}
        for first in range(0, tensor.rows, rows):
            count = min(rows, tensor.rows - first)
            start, nbytes = tensor.start + first * tensor.row_bytes, count * tensor.row_bytes
            data = self._file.view(start, nbytes)
            if plain is not None:
                yield data.view(view[plain]).reshape(count, tensor.columns), plain
            else:
                try:
                    values = gguf.dequantize(
                        data.reshape(count, tensor.row_bytes), gguf.GGMLQuantizationType(tensor.type_id)
                    )
                except NotImplementedError:
                    raise UserError(
                        f"tensor {name!r} is quantised as {tensor.kind.upper()}, which cannot be dequantised",
                        where=str(self.path),
                        fix="use another quantisation of the model, such as Q8_0 or BF16",
                    ) from None
                yield values.reshape(count, tensor.columns), "f32"
            self._file.release(start, nbytes)
