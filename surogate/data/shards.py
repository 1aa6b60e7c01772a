"""Token shards on disk: written once, then mapped into memory by the native feeder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from surogate.errors import UserError

if TYPE_CHECKING:
    from surogate.data.encode import ChunkResult

_TOKEN, _MASK, _OFFSET = np.dtype("<i4"), np.dtype("u1"), np.dtype("<i8")


@dataclass(frozen=True)
class Shard:
    """Tokenised rows.

    Attributes:
        directory: folder with ``tokens.bin`` (int32), ``mask.bin`` (uint8; 1: a training target), ``offsets.bin``
            (int64), ``origins.bin`` (int64 [rows, 2]: file, row) and ``meta.json``.
        offsets: int64 [stored rows + 1], in tokens: row i is ``offsets[i]`` to ``offsets[i + 1]``.
        index: int64, ascending: the stored rows that belong to this shard. Training and held-back rows of one
            preparation lie in the same files.
        sets: of each data set its first stored row, the one behind its last, and its weight.
        files: names of the files that rows come from.
        digest: of tokens, mask and offsets: equal for two shards with the same rows, whatever they were made by.
    """

    directory: Path
    offsets: np.ndarray
    index: np.ndarray
    sets: Sequence[tuple[int, int, float]]
    files: Sequence[str] = field(repr=False, default=())
    digest: str = ""

    @property
    def tokens_path(self) -> Path:
        """File of the tokens, int32."""
        return self.directory / "tokens.bin"

    @property
    def mask_path(self) -> Path:
        """File of the mask, uint8 a token."""
        return self.directory / "mask.bin"

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.index)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of each row."""
        lengths: np.ndarray = self.offsets[self.index + 1] - self.offsets[self.index]
        return lengths

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (int32) and mask (uint8) of row ``number`` of this shard, read from disk."""
        first, last = (int(self.offsets[self.index[number] + edge]) for edge in (0, 1))
        tokens = np.fromfile(self.tokens_path, _TOKEN, last - first, offset=first * _TOKEN.itemsize)
        return tokens, np.fromfile(self.mask_path, _MASK, last - first, offset=first)

    def origin(self, stored: int) -> str:
        """Return ``file:row`` of a stored row."""
        file, row = np.fromfile(self.directory / "origins.bin", "<i8", 2, offset=int(stored) * 16)
        return f"{self.files[file]}:{row}"

    def stored_row_at(self, token: int) -> int:
        """Return the stored row in which the token at this place of ``tokens.bin`` lies."""
        return int(np.searchsorted(self.offsets, token, side="right")) - 1


class ShardWriter:
    """Writes a shard's files to an existing empty folder. A context manager; without :meth:`finish` nothing is whole.

    Raises:
        UserError: from any method, when the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, BinaryIO] = {}
        self._digests = [hashlib.blake2b(digest_size=16) for _ in range(3)]  # tokens, mask, lengths
        self._open = 0  # tokens of the row that goes on in the next chunk
        self._end = 0  # tokens of whole rows
        self.max_id = -1
        self.rows = 0

    def __enter__(self) -> ShardWriter:
        for name in ("tokens.bin", "mask.bin", "offsets.bin", "origins.bin"):
            self._files[name] = open(self.directory / name, "wb")  # noqa: SIM115 (closed in __exit__)
        self._files["offsets.bin"].write(np.zeros(1, _OFFSET).tobytes())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with suppress(OSError) if value is not None else nullcontext():
                file.close()  # fails a second time where writing failed

    def add(self, result: ChunkResult, file_base: int) -> tuple[np.ndarray, int]:
        """Append the rows of a chunk.

        Args:
            result: of the chunk.
            file_base: index of the data set's first file among all files.

        Returns:
            int64: lengths of the rows that are whole now; and the number of targets added.
        """
        if len(result.tokens):
            self.max_id = max(self.max_id, int(result.tokens.max()))
        lengths = result.lengths.astype(np.int64)
        targets = int(result.mask.sum())
        if len(lengths):
            lengths[0] += self._open
            self._open = 0
        if result.open:
            self._open, lengths = int(lengths[-1]), lengths[:-1]
        ends = self._end + np.cumsum(lengths)
        rows = result.rows[: len(lengths)]
        origins = np.stack([np.full(len(rows), result.file + file_base), rows], axis=1)
        tokens = result.tokens.astype(_TOKEN, copy=False).data
        for digest, data in zip(self._digests, (tokens, result.mask.data, lengths.astype(_OFFSET).data), strict=True):
            digest.update(data)
        try:
            # Not ndarray.tofile, which does not tell why it could not write.
            self._files["tokens.bin"].write(tokens)
            self._files["mask.bin"].write(result.mask.data)
            self._files["offsets.bin"].write(ends.astype(_OFFSET).tobytes())
            self._files["origins.bin"].write(origins.astype(_OFFSET).tobytes())
        except OSError as error:
            raise _full(error, self.directory) from None
        self._end += int(lengths.sum())
        self.rows += len(lengths)
        return lengths, targets

    def finish(self, meta: dict[str, Any]) -> None:
        """Write ``meta.json``, and wait until all is on the disk."""
        digest = "".join(d.hexdigest() for d in self._digests)
        sizes = {"tokens": self._end, "rows": self.rows, "max_id": self.max_id, "digest": digest}
        try:
            self._files["meta.json"] = open(self.directory / "meta.json", "wb")  # noqa: SIM115
            self._files["meta.json"].write(json.dumps({**sizes, **meta}, ensure_ascii=False).encode())
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _full(error, self.directory) from None


def _full(error: OSError, directory: Path) -> Exception:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return UserError("no space left for tokenised data", where=str(directory), fix="free space, or set cache_dir")


def read_meta(directory: Path) -> dict[str, Any] | None:
    """Return ``meta.json`` of a shard whose files are all there and as long as it says, else ``None``."""
    try:
        meta = json.loads((directory / "meta.json").read_text("utf-8"))
        tokens, rows, _ = meta["tokens"], meta["rows"], meta["digest"]
        sizes = {"tokens.bin": 4 * tokens, "mask.bin": tokens, "offsets.bin": 8 * (rows + 1), "origins.bin": 16 * rows}
        whole = all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if whole else None


def open_shard(directory: Path, meta: dict[str, Any], weights: Sequence[float | None]) -> Shard:
    """Open a shard with all its rows.

    Args:
        directory: of the shard.
        meta: from :func:`read_meta`, with ``files``: names of the files that rows come from.
        weights: of each of its data sets; they are no part of what is stored.
    """
    offsets = np.fromfile(directory / "offsets.bin", _OFFSET).astype(np.int64, copy=False)
    sets = [
        (first, last, 1.0 if weight is None else float(weight))
        for (first, last), weight in zip(meta["sets"], weights, strict=True)
    ]
    return Shard(directory, offsets, np.arange(len(offsets) - 1), sets, meta["files"], meta["digest"])
