"""The result of a run: the adapter or model that lies in ``output_dir`` itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from surogate.config.schema import TrainConfig
from surogate.errors import UserError
from surogate.io.files import disk_errors
from surogate.track import EVENTS_FILE
from surogate.train.checkpoint import is_other_process

# Files by which others decide what a folder holds: one that stays from an earlier result would be loaded for the new
# one (transformers takes model.safetensors before shards, and an adapter before a model).
_DECIDING = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors",
)  # fmt: skip


def check_replaceable(config: TrainConfig) -> None:
    """Refuse to write over a model that no run has made.

    Raises:
        UserError: ``output_dir`` is the folder of ``model``, or holds a model or adapter beside which there is no
            record of a run.
    """
    directory = Path(config.output_dir)
    if not directory.is_dir():
        return
    fix = "choose another output_dir"
    if Path(config.model).exists() and directory.samefile(config.model):
        raise UserError(
            "output_dir is the folder of the model itself, which the result would overwrite",
            where=config.where("output_dir"),
            expected="another folder",
            fix=fix,
        )
    found = next(iter(_deciding(directory)), None)
    if found is not None and not (directory / EVENTS_FILE).exists():
        raise UserError(
            f"{directory} holds a model already ({found.name}), and no run wrote it",
            where=config.where("output_dir"),
            expected="a new or empty folder, or that of an earlier run",
            fix=fix,
        )


def clear_unfinished(directory: Path) -> None:
    """Remove results that killed runs left half-written."""
    with disk_errors(directory):
        for path in directory.glob(".result.tmp-*"):
            pid = path.name.rsplit("-", 1)[1]
            if pid.isdigit() and not is_other_process(int(pid)):
                shutil.rmtree(path)


def publish(directory: Path, write: Callable[[Path], None]) -> None:
    """Write the result's files beside their place, move each in when all are whole, and remove an earlier result's.

    Args:
        directory: ``output_dir``.
        write: called with an empty directory; puts the model or adapter there.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    temporary = directory / f".result.tmp-{os.getpid()}"
    try:
        with disk_errors(directory):
            temporary.mkdir()
            write(temporary)
            fresh = sorted(path.name for path in temporary.iterdir())
            for name in fresh:
                if (directory / name).is_dir():
                    shutil.rmtree(directory / name)
                os.replace(temporary / name, directory / name)
            for path in _deciding(directory):
                if path.name not in fresh:
                    path.unlink()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _deciding(directory: Path) -> Iterator[Path]:
    return (path for pattern in _DECIDING for path in sorted(directory.glob(pattern)))
