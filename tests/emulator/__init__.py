"""The CUDA kernels on a CPU: their sources, compiled for an emulator of a GPU's threads, as a plugin of the engine.

``build()`` turns every launch ``kernel<<<grid, block, bytes, stream>>>(...)`` into a call of the emulator and compiles
the files of ``csrc/cuda`` but those that call NVIDIA's libraries or the driver. What it can show, and what it cannot,
is said in ``include/cuda_runtime_api.h``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What calls cuBLASLt, cuDNN or the driver, or has instructions of the device in assembly.
_LEFT_OUT = {"backend.cpp", "cublaslt.cpp", "cudnn.cpp", "probes.cu"}
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", f"-I{HERE / 'include'}", f"-I{ROOT / 'csrc'}"]


def _balanced(text: str, begin: int, opening: str, closing: str) -> int:
    """The place behind the bracket that closes the one at ``begin``."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == opening) - (text[at] == closing)
        if depth == 0:
            return at + 1
    raise ValueError(f"a bracket is never closed: {text[begin : begin + 60]!r}")


def _callee(text: str, end: int) -> int:
    """Where the name (with its template arguments) begins that ends at ``end``."""
    at = end
    while text[at - 1].isspace():
        at -= 1
    if text[at - 1] == ">":
        depth = 0
        while True:
            at -= 1
            depth += (text[at] == ">") - (text[at] == "<")
            if depth == 0:
                break
    while re.match(r"[\w:]", text[at - 1]):
        at -= 1
    return at


def translate(source: str) -> str:
    """CUDA C++ with its launches as calls of ``emulate::launch``."""
    out, done = [], 0
    while (at := source.find("<<<", done)) >= 0:
        begin, close = _callee(source, at), source.index(">>>", at)
        opening = source.index("(", close)
        end = _balanced(source, opening, "(", ")")
        name, config, given = source[begin:at].strip(), source[at + 3 : close], source[opening + 1 : end - 1].strip()
        call = f"emulate::launch(emulate::Config({config}), [&](const auto&... args_) {{ {name}(args_...); }}"
        out.append(source[done:begin] + call + (f", {given})" if given else ")"))
        done = end
    return "".join(out) + source[done:]


def _digest(files: Sequence[Path]) -> str:
    held = hashlib.sha256(sys.version.encode())
    for path in sorted(files):
        held.update(path.as_posix().encode() + b"\0" + path.read_bytes())
    return held.hexdigest()[:16]


def build(folder: Path | None = None) -> Path:
    """The plugin library, compiled if its sources changed since the last time; some seconds a file.

    Args:
        folder: where to keep it; ``build/emulator`` of the checkout if left out.

    Raises:
        RuntimeError: the compiler's messages.
    """
    folder = folder or ROOT / "build" / "emulator"
    cuda, core = ROOT / "csrc" / "cuda", ROOT / "csrc" / "core"
    kernels = sorted(p for p in [*cuda.glob("*.cu"), *cuda.glob("*.cpp")] if p.name not in _LEFT_OUT)
    plain = [core / "kernel.cpp", core / "program.cpp", HERE / "fibers.cpp", HERE / "backend.cpp"]
    headers = [*cuda.glob("*.h"), *cuda.glob("*.cuh"), *core.glob("*.h"), *HERE.glob("include/*"), HERE / "__init__.py"]
    shared = _digest(headers)
    folder.mkdir(parents=True, exist_ok=True)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        return _build(folder, kernels, plain, shared)


def _build(folder: Path, kernels: list[Path], plain: list[Path], shared: str) -> Path:
    compiler = os.environ.get("CXX", "g++")

    def compile_one(path: Path) -> Path:
        target = folder / f"{path.stem}-{_digest([path])}-{shared}.o"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = Path(scratch, path.stem + ".cpp"), Path(scratch, "made.o")
            source.write_text(f'#line 1 "{path}"\n' + translate(path.read_text()))
            done = subprocess.run([compiler, *_FLAGS, "-c", source, "-o", made], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{path.name} does not compile for the emulator:\n{done.stderr[:4000]}")
            made.replace(target)
        return target

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compile_one, [*kernels, *plain]))
    library = folder / f"libemulated-{_digest(objects)}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [compiler, "-shared", "-o", made, *objects, "-ldl", "-Wl,--no-undefined"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"the emulated plugin does not link:\n{done.stderr[:4000]}")
        made.replace(library)
    return library
