"""Writing files so that a reader sees a whole one or none, and a full disk is one clear message."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from surogate.errors import UserError


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission and the like, met while writing to ``path``, into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "the disk is full", where=str(path), fix="free some space, or write to another disk"
            ) from error
        if error.errno == errno.EFBIG:
            raise UserError(
                "a file may not grow so large", where=str(path), fix="lift the limit (ulimit -f), or write elsewhere"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            raise UserError(
                f"cannot be written: {error.strerror}", where=str(path), fix="give a directory that you may write to"
            ) from error
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the name ``path`` only when the block ends without an exception."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with disk_errors(path):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # before the name: else a power cut can leave the name and lose the content
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document, indented, atomically. Keys keep their order."""
    with atomic_file(path) as file:
        file.write((json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())


def make_directory(path: Path) -> None:
    """Create a directory and its parents if they do not exist.

    Raises:
        UserError: that is not allowed, or a file is in the way.
    """
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def check_free_space(path: Path, nbytes: int) -> None:
    """Raise UserError, with both numbers, if the file system of ``path``, which exists, has not ``nbytes`` free."""
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise UserError(
            f"not enough disk space: {free:,} bytes free",
            where=str(path),
            expected=f"{nbytes:,} bytes",
            fix="free some space, or write to another disk",
        )
