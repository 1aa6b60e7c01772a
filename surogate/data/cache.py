"""The cache of tokenised data: what a shard depends on is its name, and it appears under that name whole or not at all.

Two runs that want the same shard at once: the second waits for the first and takes its work. A run that is killed
leaves a folder under a temporary name, which the next one with the same key removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from surogate.errors import UserError

_RECENT = 2_000_000_000  # nanoseconds within which a file may change again without changing its time stamp


class Cache:
    """A folder of shards.

    Args:
        directory: made if it is not there.

    Raises:
        UserError: it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tokens, self._contents = directory / "tokens", directory / "contents"
        try:
            for folder in (self._tokens, self._contents):
                folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._tokens, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise UserError(
                f"the cache cannot be written: {error.strerror}", where=str(directory), fix="set cache_dir"
            ) from None

    def path(self, key: str) -> Path:
        """Return where the shard of that key is, or will be."""
        return self._tokens / key

    def hash_file(self, path: Path) -> str:
        """Return a hash of a file's contents; remembered as long as its size and time of change stay."""
        state = path.stat()
        stamp = [state.st_size, state.st_mtime_ns, state.st_ino]
        memo = self._contents / hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
        try:
            known = json.loads(memo.read_text())
            if known["stamp"] == stamp:
                return str(known["hash"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        digest = hashlib.blake2b(digest_size=20)
        try:
            with open(path, "rb") as data:
                while block := data.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
        if time.time_ns() - state.st_mtime_ns > _RECENT:
            with tempfile.NamedTemporaryFile("w", dir=self._contents, delete=False) as file:
                json.dump({"stamp": stamp, "hash": digest.hexdigest()}, file)
            os.replace(file.name, memo)
        return digest.hexdigest()

    @contextmanager
    def building(self, key: str, whole: Callable[[Path], bool], waiting: Callable[[], None]) -> Iterator[Path | None]:
        """Give an empty folder to build the shard in, and put it in place at the end of the block.

        Args:
            key: of the shard.
            whole: is the shard in this folder whole? One that is not is removed.
            waiting: called when another run is building the same shard, before waiting for it.

        Yields:
            The folder, or ``None`` when another run has built the shard in the meantime. If the block raises, the
            folder is removed.
        """
        with open(self._tokens / f"{key}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks: both runs build, the last one's equal result stays
            if self.path(key).exists():
                if whole(self.path(key)):
                    yield None
                    return
                shutil.rmtree(self.path(key), ignore_errors=True)
            for leftover in self._tokens.glob(f"{key}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=self._tokens))
            try:
                yield folder
                _rename(folder, self.path(key))
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, final: Path) -> None:
    try:
        os.rename(folder, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # without locks another run may have been faster
            raise


@cache
def code_version() -> str:
    """Return a hash of the code that makes tokens: this package's files and the versions of the libraries it uses."""
    digest = hashlib.blake2b(digest_size=16)
    here = Path(__file__).parent
    for path in sorted([*here.rglob("*.py"), *here.rglob("*.jinja")]):
        digest.update(path.read_bytes())
    for library in ("tokenizers", "jinja2"):
        digest.update(version(library).encode())
    return digest.hexdigest()


def make_key(parts: Any) -> str:
    """Return the hash of plain data."""
    text = json.dumps([code_version(), parts], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
