"""From what a user calls a model to where its files are."""

from __future__ import annotations

import re
from pathlib import Path

from surogate.errors import UserError

# What a model is made of. Weights in other formats and copies (`original/`, `consolidated*`) are not downloaded.
MODEL_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "merges.txt", "vocab.txt"]
OTHER_FILES = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_model(name: str, *, offline: bool = False) -> Path:
    """Return where a model's files are, after downloading them from the Hugging Face hub if need be.

    Args:
        name: a directory, a ``.gguf`` or ``.safetensors`` file, or an id on the hub such as
            ``HuggingFaceTB/SmolLM2-135M-Instruct``. What exists locally comes first.
        offline: use the hub's local cache only.

    Raises:
        UserError: there is no such path; or no such id, no right to it, or no way to reach the hub.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix in (".gguf", ".safetensors"):
            return path
        raise UserError("not a model", where=str(path), expected="a directory, a .gguf file or an id on the hub")
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise UserError(
            "no such model",
            where=name,
            expected="an existing directory or .gguf file, or an id on the hub",
            fix="check the path (a relative one starts where the command runs)",
        )
    return _download(name, offline)


def _download(name: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    by_hand = (
        f"run `hf download {name} --local-dir DIR` where the hub can be reached, copy DIR here, and set model to it"
    )
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=MODEL_FILES,
                ignore_patterns=OTHER_FILES,
                local_files_only=offline,
            )
        )
    except GatedRepoError:
        raise UserError(
            "the model asks for its licence to be accepted first",
            where=name,
            fix="accept it on the model's page, then log in with `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            "neither a local path nor a model on the Hugging Face hub",
            where=name,
            expected="a local directory, a .gguf file, or an id such as owner/name",
            fix="check the spelling; for a private model, log in with `hf auth login`",
        ) from None
    except HFValidationError:
        raise UserError(
            "neither a local path nor a possible id on the Hugging Face hub",
            where=name,
            expected="a local directory, a .gguf file, or an id such as owner/name",
            fix="check the path",
        ) from None
    except LocalEntryNotFoundError:
        what = "not a local path, and not in the local cache of the Hugging Face hub"
        if not offline:
            what += ", which cannot be reached"
        raise UserError(what, where=name, expected="an existing path, or access to the hub", fix=by_hand) from None
    except Exception as error:  # whatever the HTTP client of this version raises, a full disk, ...
        raise UserError(f"the download from the Hugging Face hub failed: {error}", where=name, fix=by_hand) from None
