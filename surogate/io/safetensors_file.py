"""One safetensors file: header checked to the last byte, tensors as views of the mapping.

The format: ``u64`` length of the header, a JSON header ``{name: {dtype, shape, data_offsets}}`` with an optional
``__metadata__`` of strings, then the tensors' bytes without holes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate.errors import UserError
from surogate.io.dtypes import NUMPY_DTYPES, Array
from surogate.io.mapped import MappedFile, broken, truncated

# Bytes per element of every dtype of the format that is a whole number of bytes.
DTYPE_BYTES = {name.upper(): dtype.itemsize for name, dtype in NUMPY_DTYPES.items()}
DTYPE_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "C64": 8}
MAX_HEADER = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: lower-case dtype name, shape, first byte in the file, bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class DuplicateKeyError(ValueError):
    """A JSON object names a key twice."""


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for :func:`json.loads` that refuses a key which appears twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return result


class SafetensorsFile:
    """A validated safetensors file.

    Attributes:
        entries: name to :class:`Entry`, in the order of the data.
        metadata: the file's ``__metadata__``.

    Raises:
        UserError: the file is truncated, too long, or its header breaks the format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        size = self._file.size
        if size < 8:
            raise truncated(self.path, size, 8, "header length")
        length = int.from_bytes(self._file.view(0, 8).tobytes(), "little")
        if length > MAX_HEADER:
            raise broken(self.path, f"the header claims {length} bytes, so this is not a safetensors file")
        self._data_start = 8 + length
        if size < self._data_start:
            raise truncated(self.path, size, self._data_start, "header")
        self.metadata, self.entries = self._parse(self._file.view(8, length).tobytes())

    def _parse(self, header: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
        try:
            document = json.loads(header.decode("utf-8"), object_pairs_hook=no_duplicates)
        except DuplicateKeyError as error:
            raise broken(self.path, f"the header names {error.args[0]!r} twice") from None
        except (ValueError, RecursionError):
            raise broken(self.path, "the header is not valid JSON, so this is not a safetensors file") from None
        if not isinstance(document, dict):
            raise broken(self.path, "the header is not a JSON object")
        metadata = document.pop("__metadata__", None) or {}
        entries = [(name, self._entry(name, record)) for name, record in document.items()]
        entries.sort(key=lambda item: (item[1].start, item[1].nbytes))
        end = self._data_start
        for name, entry in entries:
            if entry.start != end:
                problem = "overlaps another tensor" if entry.start < end else "is preceded by unused bytes"
                raise broken(self.path, f"tensor {name!r} {problem}", f"data from byte {end}, found {entry.start}")
            end = entry.start + entry.nbytes
        if self._file.size < end:
            raise truncated(self.path, self._file.size, end)
        if self._file.size > end:
            raise broken(self.path, f"{self._file.size} bytes found, more than the header describes", f"{end} bytes")
        return metadata, dict(entries)

    def _entry(self, name: str, record: Any) -> Entry:
        try:
            dtype, shape = record["dtype"], tuple(record["shape"])
            begin, end = record["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            raise broken(self.path, f"the record of tensor {name!r} is malformed", "dtype, shape and data_offsets")
        if dtype not in DTYPE_BYTES:
            raise UserError(
                f"tensor {name!r} has dtype {dtype!r}, which cannot be read",
                where=str(self.path),
                expected="one of F32, BF16, F16, F64",
                fix="use the unquantised model",
            )
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        if end - begin != nbytes:
            expected = f"{nbytes} for {dtype} {list(shape)}"
            raise broken(self.path, f"tensor {name!r} occupies {end - begin} bytes", expected)
        return Entry(dtype.lower(), shape, self._data_start + begin, nbytes)

    def raw(self, name: str) -> Array:
        """Return a tensor as a read-only view of the mapping, in its stored dtype (bf16: ``uint16`` bits).

        Raises:
            KeyError: no such tensor, or a dtype that NumPy cannot view.
        """
        entry = self.entries[name]
        return self._file.view(entry.start, entry.nbytes).view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    def slices(self, name: str, elements: int) -> Iterator[Array]:
        """Yield a tensor flat, ``elements`` at a time, and let go of the pages of each slice after it is used."""
        entry = self.entries[name]
        dtype = NUMPY_DTYPES[entry.dtype]
        step = elements * dtype.itemsize
        for offset in range(0, entry.nbytes, step):
            nbytes = min(step, entry.nbytes - offset)
            yield self._file.view(entry.start + offset, nbytes).view(dtype)
            self._file.release(entry.start + offset, nbytes)

    def release(self, name: str) -> None:
        """Let go of a tensor's pages; views of it stay valid and are read again when touched."""
        entry = self.entries[name]
        self._file.release(entry.start, entry.nbytes)
