"""``surogate doctor``: what this machine has, what is installed, and what works."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

_LIBRARIES = ("numpy", "pydantic", "PyYAML", "safetensors", "tokenizers", "transformers", "datasets", "gguf", "rich")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine has and whether the engine works on it",
        description="Show processor, memory, disk and versions, and try the native engine.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print; 0 if a run can be started here, else 1."""
    from surogate import __version__
    from surogate.track.machine import Machine
    from surogate.track.progress import size

    here = Machine.here()
    _row("surogate", __version__)
    _row("python", f"{platform.python_version()} ({sys.executable})")
    _row("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    _row("processor", f"{here.name}: {here.cores} cores, {here.logical} threads")
    _row("instructions", " ".join(here.isa) or "no vector instructions known to Surogate")
    _row("memory", f"{size(here.memory)}, {size(here.available)} of it available")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for name, folder in (("disk, here", Path.cwd()), ("disk, cache", cache)):
        _row(name, f"{size(shutil.disk_usage(_existing(folder)).free)} free in {folder}")
    for name in _LIBRARIES:
        _row(name, _version(name))
    return 0 if _engine(here.cores) else 1


def _engine(threads: int) -> bool:
    """Try the native engine: load it, ask for its kernels, measure its matrix product."""
    try:
        from surogate import _native
    except ImportError as error:
        _row("engine", f"does not load: {error}")
        _row("fix", "install Surogate again (pip install .) with a C++20 compiler on the machine")
        return False
    kernels = _native.Engine("cpu", threads).kernels()
    rate = _native.sgemm_rate(threads, 1024, 1024, 1024)
    _row("engine", f"cpu works, {len(kernels)} kernels")
    _row("matrix product", f"{rate / 1e9:,.0f} GFLOP/s in fp32 with {threads} threads")
    _gpus()
    return True


def _gpus() -> None:
    """GPUs, driver and libraries; and what keeps a run from using them, with the fix."""
    from surogate import _native, cuda
    from surogate.errors import UserError
    from surogate.track.progress import size

    try:
        for gpu in cuda.gpus():
            free, total = cuda.memory(gpu.index)
            memory = f"{size(free)} of {size(total)} free"
            _row(f"gpu {gpu.index}", f"{gpu.name}, compute capability {gpu.sm / 10:.1f}, {memory}")
        cuda.require()
        driver, libraries = cuda.driver_version() or 0, cuda.versions()
        found = {"driver": f"for CUDA {driver // 1000}.{driver % 1000 // 10}", **libraries}
        _row("cuda libraries", ", ".join(f"{name} {version}" for name, version in found.items()))
        kernels = _native.Engine(**cuda.engine_arguments()).kernels()
        _row("cuda", f"works, {len(kernels)} kernels")
    except UserError as error:
        _row("cuda", f"not used: {error.what}")
        if error.fix:
            _row("fix", error.fix)
    except RuntimeError as error:
        _row("cuda", f"does not start: {error}")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _row(name: str, text: str) -> None:
    print(f"{name:<15} {text}")
