"""GPUs: which there are, the plugin that drives them, and the NVIDIA libraries that it opens.

Nothing here imports the plugin or creates anything on a GPU until it is asked to: the driver is asked through
``libcuda.so.1``, libraries are found as files. Every way in which a GPU cannot be used is one :class:`UserError` with
its fix.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from surogate.errors import UserError

_DRIVER_NEEDED = 13000  # as cuDriverGetVersion counts; minor versions of 13 are compatible
_INSTALL = "pip install 'surogate[cuda13]'"

# Library: soname, folders of NVIDIA's wheels below site-packages, the wheel.
_LIBRARIES = {
    "cublaslt": ("libcublasLt.so.13", ("nvidia/cu13/lib", "nvidia/cublas/lib"), "nvidia-cublas"),
    "cudnn": ("libcudnn.so.9", ("nvidia/cudnn/lib",), "nvidia-cudnn-cu13"),
    "cudart": ("libcudart.so.13", ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib"), "nvidia-cuda-runtime"),
}
_SYSTEM = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. ``sm``: compute capability, 90 for 9.0. ``memory``: bytes."""

    index: int
    name: str
    sm: int
    multiprocessors: int
    memory: int


def plugin() -> Path | None:
    """The plugin library beside the native extension; ``None`` where the package was built without it."""
    spec = importlib.util.find_spec("surogate._native")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "libsurogate_cuda.so"
    return path if path.exists() else None


def library(name: str) -> Path | None:
    """Path of ``cublaslt``, ``cudnn`` or ``cudart``: from NVIDIA's wheels, else from the system."""
    soname, folders, _ = _LIBRARIES[name]
    for root in sys.path:
        for folder in folders:
            path = Path(root or ".", folder, soname)
            if path.exists():
                return path.resolve()
    return next((Path(d, soname) for d in _SYSTEM if Path(d, soname).exists()), None)


def driver_version() -> int | None:
    """CUDA version that the driver supports, 13000 for 13.0; ``None`` without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def gpus() -> list[Gpu]:
    """The GPUs that this process may use, in CUDA's order; at least one.

    Raises:
        UserError: no GPU, no driver, one that is too old, or one that does not start.
    """
    driver = _driver()
    count = ctypes.c_int()
    _ask(driver.cuDeviceGetCount(ctypes.byref(count)), driver)
    found = []
    for index in range(count.value):
        handle, name, total = _handle(driver, index), ctypes.create_string_buffer(256), ctypes.c_size_t()
        _ask(driver.cuDeviceGetName(name, len(name), handle), driver)
        _ask(driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle), driver)
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR, _MULTIPROCESSOR_COUNT
        major, minor, processors = (_attribute(driver, handle, a) for a in (75, 76, 16))
        found.append(Gpu(index, name.value.decode(), 10 * major + minor, processors, total.value))
    return found


def memory(index: int) -> tuple[int, int]:
    """Bytes free and in all on a GPU, with a CUDA context on it: what that takes is not free any more.

    The context is made for the question where this process has none yet, which takes a moment and some 500 MB.
    """
    driver = _driver()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with _context(driver, index):
        _ask(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), driver)
    return free.value, total.value


def require(index: int = 0) -> Gpu:
    """The GPU with that index, when everything that a run on it needs is there.

    Raises:
        UserError: what is missing, and the fix.
    """
    if plugin() is None:
        raise UserError(
            "this installation of Surogate was built without its CUDA plugin",
            where="device",
            fix="install it from a wheel that has it, or build it where nvcc 13 is (docs/cuda.md); or set device: cpu",
        )
    found = gpus()
    if index >= len(found):
        raise UserError(f"there is no GPU {index}", where="device", expected=f"an index below {len(found)}")
    gpu = found[index]
    if gpu.sm < 80:
        raise UserError(
            f"{gpu.name} has compute capability {gpu.sm / 10:.1f}",
            where="device",
            expected="8.0 or newer (A100, RTX 30 and what came after them)",
            fix="set device: cpu, or use another GPU",
        )
    missing = [wheel for name, (_, _, wheel) in _LIBRARIES.items() if library(name) is None]
    if missing:
        raise UserError(f"NVIDIA's libraries are missing: {', '.join(missing)}", where="device", fix=_INSTALL)
    return gpu


def engine_arguments(
    index: int = 0,
    *,
    cache_dir: Path | None = None,
    tune: bool = True,
    eager: bool = False,
    check_nan: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for ``surogate._native.Engine`` on a GPU.

    Args:
        index: of the GPU.
        cache_dir: folder that keeps chosen matrix-product algorithms from run to run; ``None``: they are not kept.
        tune: choose those algorithms by timing; else the library's first proposal, the same in every run.
        eager: launch kernel by kernel instead of as CUDA graphs.
        check_nan: eager, and stop at the first instruction that writes a NaN.

    Raises:
        UserError: as :func:`require`.
    """
    require(index)
    settings = {name: library(name) for name in _LIBRARIES}
    config = [f"{name}={path}" for name, path in settings.items()]
    if cache_dir is not None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        config.append(f"cache={cache_dir}")
    config += [f"{key}={int(on)}" for key, on in (("tune", tune), ("eager", eager), ("check_nan", check_nan))]
    return {"backend": "cuda", "device": index, "plugin": str(plugin()), "config": "\n".join(config)}


def versions() -> dict[str, str]:
    """Versions of the libraries that a run would use, by name; ``missing`` where there is none. Loads them."""
    found = {name: "missing" for name in ("cublaslt", "cudnn")}
    paths = {name: library(name) for name in found}
    if paths["cublaslt"] is not None:
        ask = ctypes.CDLL(str(paths["cublaslt"])).cublasLtGetVersion
        ask.restype = ctypes.c_size_t
        n = int(ask())
        found["cublaslt"] = f"{n // 10000}.{n // 100 % 100}.{n % 100}"
    if paths["cudnn"] is not None:
        ask = ctypes.CDLL(str(paths["cudnn"])).cudnnGetVersion
        ask.restype = ctypes.c_size_t
        n = int(ask())
        found["cudnn"] = f"{n // 10000}.{n // 100 % 100}.{n % 100}"
    return found


@cache
def _driver() -> ctypes.CDLL:
    version = driver_version()
    if version is None:
        raise UserError(
            "there is no NVIDIA driver (libcuda.so.1)",
            where="device",
            fix="install NVIDIA's driver 580 or newer, or set device: cpu",
        )
    if version < _DRIVER_NEEDED:
        raise UserError(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}",
            where="device",
            expected="CUDA 13.0 or newer: driver 580 or newer",
            fix="update the driver, or set device: cpu",
        )
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuInit(0)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        raise UserError(
            "the NVIDIA driver shows no GPU to this process",
            where="device",
            expected="at least one GPU in the output of nvidia-smi, and not hidden by CUDA_VISIBLE_DEVICES",
            fix="set device: cpu to train without one",
        )
    if status != 0:
        raise UserError(f"the NVIDIA driver does not start: {_message(driver, status)}", where="device")
    return driver


def _message(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


def _ask(status: int, driver: ctypes.CDLL) -> None:
    if status != 0:
        raise UserError(f"the NVIDIA driver reports: {_message(driver, status)}", where="device")


def _handle(driver: ctypes.CDLL, index: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _ask(driver.cuDeviceGet(ctypes.byref(handle), index), driver)
    return handle


def _attribute(driver: ctypes.CDLL, handle: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    _ask(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle), driver)
    return value.value


@contextmanager
def _context(driver: ctypes.CDLL, index: int) -> Iterator[None]:
    """The device's primary context, which the CUDA runtime uses too, current within the block."""
    handle, context = _handle(driver, index), ctypes.c_void_p()
    _ask(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), driver)
    try:
        _ask(driver.cuCtxPushCurrent_v2(context), driver)
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)
