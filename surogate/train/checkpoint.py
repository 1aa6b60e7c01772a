"""Checkpoints that are whole or not there.

``checkpoint-<step>/`` holds what others read (a Hugging Face model or a PEFT adapter) and ``surogate_state/`` with what
is needed to continue bit for bit: ``state.json``, ``arrays.safetensors`` and ``manifest.json``, the list of all files
with sizes and checksums.

A checkpoint is written under the name ``checkpoint-<step>.tmp-<pid>``; every file is flushed to the disk, the manifest
comes last, and only then does the directory get its name. So whatever moment a process dies at, a directory named
``checkpoint-<step>`` with a manifest that agrees with its files is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surogate.errors import UserError
from surogate.io.dtypes import NUMPY_DTYPES, Array
from surogate.io.files import check_free_space, disk_errors, make_directory
from surogate.io.safetensors_file import SafetensorsFile
from surogate.io.safetensors_writer import array_tensor, write_safetensors

STATE_DIR = "surogate_state"
_STATE, _ARRAYS, _MANIFEST = "state.json", "arrays.safetensors", "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)(\.replaced)?")
_TEMPORARY = re.compile(r"checkpoint-\d+\.tmp-(\d+)(-\w+)?")
_CHUNK = 1 << 20
_log = logging.getLogger(__name__)

WriteModel = Callable[[Path], None]
Arrays = Mapping[str, "Array | bytes"]


class CheckpointWriter:
    """Writes the checkpoints of one run.

    One writer at a time may work in a directory. What a killed run left half-written there is removed at the start.

    Args:
        output_dir: made if it does not exist.
        save_total_limit: how many complete checkpoints to keep; None keeps all. The newest is never removed.

    Raises:
        UserError: the directory cannot be written, or the limit is below 1.
    """

    _writing: set[Path] = set()  # temporary directories of all writers of this process

    def __init__(self, output_dir: str | Path, save_total_limit: int | None = None) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise UserError(f"is {save_total_limit}", where="save_total_limit", expected="at least 1, or left out")
        self.output_dir = Path(output_dir)
        self.save_total_limit = save_total_limit
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        make_directory(self.output_dir)
        with disk_errors(self.output_dir):
            self._clean()

    def save(
        self, step: int, write: WriteModel, state: Mapping[str, Any], arrays: Arrays, *, write_bytes: int = 0
    ) -> Path:
        """Write a checkpoint and return its directory.

        Args:
            step: optimizer steps done. A checkpoint of the same step is replaced.
            write: called with a directory; puts the model or adapter there.
            state: what JSON can hold; floats come back bit for bit.
            arrays: name to array of any shape and a plain dtype (bf16 as ``uint16``), or to bytes.
            write_bytes: about how much ``write`` will need, for the check that the disk has room for all.

        Raises:
            UserError: the disk is full or cannot be written; an error of an earlier :meth:`save_async`.
        """
        self.wait()
        self._check_room(arrays, write_bytes)
        return self._save(step, write, state, arrays)

    def save_async(
        self, step: int, write: WriteModel, state: Mapping[str, Any], arrays: Arrays, *, write_bytes: int = 0
    ) -> None:
        """Do :meth:`save` on a background thread; one that is still going on is waited for first.

        The caller hands over copies: nothing that ``write``, ``state`` and ``arrays`` refer to may change before
        :meth:`wait` returns. An error on the thread is raised by the next call of any method here.
        """
        self.wait()
        self._check_room(arrays, write_bytes)

        def work() -> None:
            try:
                self._save(step, write, state, arrays)
            except BaseException as error:  # handed to the main thread
                self._error = error

        # Not a daemon: an interpreter that ends waits until the checkpoint is whole.
        self._thread = threading.Thread(target=work, name=f"checkpoint-{step}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _check_room(self, arrays: Arrays, write_bytes: int) -> None:
        nbytes = sum(len(a) if isinstance(a, bytes) else a.nbytes for a in arrays.values())
        check_free_space(self.output_dir, nbytes + write_bytes + _CHUNK)

    def _save(self, step: int, write: WriteModel, state: Mapping[str, Any], arrays: Arrays) -> Path:
        final = self.output_dir / f"checkpoint-{step}"
        temporary = self.output_dir / f"checkpoint-{step}.tmp-{os.getpid()}"
        self._writing.add(temporary)
        try:
            with disk_errors(temporary):
                if temporary.exists():
                    shutil.rmtree(temporary)
                (temporary / STATE_DIR).mkdir(parents=True)
                write(temporary)
                text = json.dumps(dict(state), indent=2)
                (temporary / STATE_DIR / _STATE).write_text(text, encoding="utf-8")
                tensors = [
                    array_tensor(name, np.frombuffer(a, np.uint8) if isinstance(a, bytes) else a)
                    for name, a in arrays.items()
                ]
                write_safetensors(temporary / STATE_DIR / _ARRAYS, tensors, {"format": "surogate"})
                _seal(temporary, step, serial=1 + max((c.serial for c in _complete(self.output_dir)), default=0))
                self._publish(temporary, final)
                self._prune()
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            self._writing.discard(temporary)
        return final

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the finished directory its name. An older one of that name stays findable until the new one is there."""
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            self._remove(replaced)
            os.rename(final, replaced)
        os.rename(temporary, final)
        _sync_directory(self.output_dir)
        self._remove(replaced)

    def _prune(self) -> None:
        if self.save_total_limit is None:
            return
        newest_first = sorted(_complete(self.output_dir), key=lambda c: -c.serial)
        for checkpoint in newest_first[self.save_total_limit :]:
            self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        """Remove a directory; it loses its name first, so that no half-removed checkpoint is ever seen."""
        if path.exists():
            rubbish = path.with_name(f"{path.name.removesuffix('.replaced')}.tmp-{os.getpid()}-old")
            if rubbish.exists():
                shutil.rmtree(rubbish)
            os.rename(path, rubbish)
            shutil.rmtree(rubbish)

    def _clean(self) -> None:
        for path in list(self.output_dir.iterdir()):
            temporary, named = _TEMPORARY.fullmatch(path.name), _NAME.fullmatch(path.name)
            if temporary and path not in self._writing and not is_other_process(int(temporary[1])):
                shutil.rmtree(path)
            elif named and named[2] and isinstance(_manifest(path.with_suffix("")), dict):
                self._remove(path)  # killed at the end of _publish; between its renames this would be all there is


@dataclass(frozen=True)
class _Complete:
    """A checkpoint that is whole; ``serial`` counts the saves in its directory."""

    path: Path
    step: int
    serial: int


class StateArrays(Mapping[str, Array]):
    """The arrays of a checkpoint, mapped into memory.

    ``arrays[name]`` is a read-only view (bytes: ``uint8``). Its pages are given back when the next one is asked for, so
    that walking over all of them keeps one in memory at a time; :meth:`read_into` keeps a few megabytes.
    """

    def __init__(self, path: Path) -> None:
        self._file = SafetensorsFile(path)
        self._last: str | None = None

    def __getitem__(self, name: str) -> Array:
        view = self._file.raw(name)
        if self._last is not None:
            self._file.release(self._last)
        self._last = name
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.entries)

    def __len__(self) -> int:
        return len(self._file.entries)

    def read_into(self, name: str, destination: Array) -> None:
        """Copy an array's bytes to ``destination``, C-contiguous and of the same size.

        Raises:
            KeyError: no such array.
            ValueError: the sizes differ.
        """
        entry = self._file.entries[name]
        if destination.nbytes != entry.nbytes or not destination.flags.c_contiguous:
            raise ValueError(f"{name!r}: {entry.nbytes} bytes into {destination.nbytes}, contiguous")
        flat = destination.reshape(-1).view(NUMPY_DTYPES[entry.dtype])
        start = 0
        for part in self._file.slices(name, _CHUNK):
            flat[start : start + part.size] = part
            start += part.size


def find_latest(output_dir: str | Path, report: Callable[[str], None] | None = None) -> Path | None:
    """Return the newest complete checkpoint in a directory, or None.

    Newest is the one that was saved last, not the one of the highest step: the two differ if a run was started again
    in the same directory. Complete means that all files of the manifest are there in their sizes.

    Args:
        output_dir: need not exist.
        report: called with a sentence for every checkpoint that is passed over as incomplete; None: a log warning.
    """
    found = _complete(Path(output_dir), report or _log.warning)
    return max(found, key=lambda c: c.serial).path if found else None


def load_state(path: str | Path, verify: bool = True) -> tuple[dict[str, Any], StateArrays]:
    """Return ``state`` and ``arrays`` as they were given to :meth:`CheckpointWriter.save`.

    Args:
        path: a directory ``checkpoint-<step>``.
        verify: compare the checksums of all its files (about 1 s a GB), not only their sizes.

    Raises:
        UserError: it is not a checkpoint, incomplete, or a file has changed since it was saved.
    """
    path = Path(path)
    manifest = _manifest(path)
    problem = manifest if isinstance(manifest, str) else ""
    if not isinstance(manifest, str) and verify:
        changed = (name for name, record in manifest["files"].items() if _checksum(path / name) != record["blake2b"])
        bad = next(changed, None)
        problem = f"{bad} was changed or damaged after it was saved" if bad else ""
    if problem or isinstance(manifest, str):
        raise UserError(
            f"not a complete checkpoint: {problem}",
            where=str(path),
            fix="resume from another checkpoint, or let resume_from_checkpoint: true find the newest complete one",
        )
    state = json.loads((path / STATE_DIR / _STATE).read_text(encoding="utf-8"))
    return state, StateArrays(path / STATE_DIR / _ARRAYS)


def check_output_dir(path: str | Path, bytes_needed: int) -> None:
    """Make the output directory and prove that it can be written and has room, before any work is done.

    Raises:
        UserError: it cannot, or has less than ``bytes_needed`` bytes free (the message has both numbers).
    """
    path = Path(path)
    make_directory(path)
    probe = path / f".write-test-{os.getpid()}"
    with disk_errors(path):
        probe.write_bytes(b"x")
        probe.unlink()
    check_free_space(path, bytes_needed)


def _complete(output_dir: Path, report: Callable[[str], None] | None = None) -> list[_Complete]:
    found: list[_Complete] = []
    for path in sorted(output_dir.iterdir()) if output_dir.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        manifest = _manifest(path)
        if not isinstance(manifest, str):
            found.append(_Complete(path, int(manifest["step"]), int(manifest["serial"])))
        elif report is not None:
            report(f"{path} is passed over: {manifest}")
    return found


def _manifest(path: Path) -> dict[str, Any] | str:
    """Return a checkpoint's manifest if all its files are there in their sizes, else what is wrong."""
    try:
        manifest = json.loads((path / STATE_DIR / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return f"its format is {manifest['format']}, and this version reads {_FORMAT}"
        for name, record in manifest["files"].items():
            size = (path / name).stat().st_size if (path / name).is_file() else None
            if size != record["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes instead of {record['bytes']}"
                return f"{name} {found}"
        return {"step": manifest["step"], "serial": manifest["serial"], "files": manifest["files"]}
    except FileNotFoundError:
        return f"{STATE_DIR}/{_MANIFEST} is missing, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{STATE_DIR}/{_MANIFEST} cannot be read ({error})"


def _seal(directory: Path, step: int, serial: int) -> None:
    """Flush all files to the disk, then write and flush the manifest."""
    files: dict[str, dict[str, Any]] = {}
    directories = [directory]
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            directories.append(path)
        else:
            name = path.relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, "blake2b": _checksum(path, sync=True)}
    manifest = directory / STATE_DIR / _MANIFEST
    with open(manifest, "w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, "step": step, "serial": serial, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in reversed(directories):
        _sync_directory(path)


def _checksum(path: Path, sync: bool = False) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse to flush a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_other_process(pid: int) -> bool:
    """Whether a process of this id runs and is not this one (ids come again, in containers above all)."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
