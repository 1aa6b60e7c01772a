"""A file mapped into memory, whose pages are given back as soon as they are done with."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from surogate.errors import UserError
from surogate.io.dtypes import Array


def truncated(path: Path, found: int, expected: int, part: str = "") -> UserError:
    """The error for a file that ends before its own header says it does (sizes in bytes)."""
    return UserError(
        f"the file is incomplete{f' ({part})' if part else ''}: {found} bytes found",
        where=str(path),
        expected=f"{expected} bytes",
        fix="download the file again",
    )


def broken(path: Path, what: str, expected: str = "") -> UserError:
    """The error for a file whose content contradicts its format."""
    return UserError(what, where=str(path), expected=expected, fix="download the file again")


class MappedFile:
    """A read-only mapping of a whole file.

    Args:
        path: an existing file.

    Raises:
        UserError: the file cannot be opened or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise UserError("the file is empty", where=str(path), fix="download the file again")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
        self.data: Array = np.frombuffer(self.map, np.uint8)

    def view(self, start: int, nbytes: int) -> Array:
        """Return ``uint8[nbytes]`` of the mapping, no copy. The range must lie in the file."""
        return self.data[start : start + nbytes]

    def release(self, start: int, nbytes: int) -> None:
        """Give the pages that lie wholly or partly in the range back to the system; they are read again if touched.

        Mapped pages count towards the resident size of the process, so a reader calls this behind itself.
        """
        first = start - start % mmap.PAGESIZE
        if nbytes > 0 and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)
