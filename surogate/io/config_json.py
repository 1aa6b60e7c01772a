"""The model's configuration, whatever form the model comes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surogate.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UserError: missing, unreadable, not JSON (with line and column), or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("the file does not exist", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON: {error.msg}",
            where=f"{path}:{error.lineno}:{error.colno}",
            fix="download the file again, or correct it at that place",
        ) from None
    if not isinstance(document, dict):
        raise UserError(f"a JSON {type(document).__name__}", where=str(path), expected="a JSON object")
    return document


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Return the content of a model's ``config.json``.

    Args:
        path: a Hugging Face directory, or a ``.gguf`` file, from whose metadata the configuration is derived.

    Raises:
        UserError: there is none, or it is broken.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        from surogate.io.gguf_file import GGUFFile
        from surogate.io.gguf_model import model_config

        return model_config(GGUFFile(path))
    if not path.is_dir():
        raise UserError(
            "no such model",
            where=str(path),
            expected="a directory with config.json, or a .gguf file",
            fix="check the path",
        )
    if not (path / "config.json").is_file():
        raise UserError(
            "the directory has no config.json",
            where=str(path),
            expected="a Hugging Face model directory",
            fix="give the directory that holds config.json and the .safetensors files",
        )
    return read_json(path / "config.json")
