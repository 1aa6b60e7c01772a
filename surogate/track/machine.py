"""What this machine is, from what Linux says about itself. Nothing but the standard library."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

# Instruction sets that the engine's kernels or a BLAS make use of, as /proc/cpuinfo names them.
_ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Machine:
    """A machine as this process may use it.

    Attributes:
        name: of the processor.
        cores: physical ones.
        logical: cores with hyper-threads.
        isa: vector instructions, as ``/proc/cpuinfo`` names them.
        memory: bytes; a container's limit counts.
        available: bytes of it that are free or can be had at once.
    """

    name: str
    cores: int
    logical: int
    isa: tuple[str, ...]
    memory: int
    available: int

    @classmethod
    def here(cls, root: Path = Path("/")) -> Machine:
        """Look at this machine. ``root``: where ``proc`` and ``sys`` are, for tests."""
        cpuinfo = _read(root / "proc/cpuinfo")
        meminfo = _fields(_read(root / "proc/meminfo"))
        total, available = _kib(meminfo.get("MemTotal", "")), _kib(meminfo.get("MemAvailable", ""))
        limit, used = _cgroup(root / "sys/fs/cgroup")
        if 0 < limit < total:
            total, available = limit, min(available, max(0, limit - used))
        allowed = (
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        )
        return cls(
            name=cpu_name(cpuinfo),
            cores=_cores(root / "sys/devices/system/cpu", allowed),
            logical=len(allowed),
            isa=_isa(cpuinfo),
            memory=total,
            available=available,
        )


def cpu_name(cpuinfo: str | None = None) -> str:
    """Return the processor's name, e.g. ``AMD EPYC 9654 96-Core Processor``; else its architecture."""
    fields = _fields(_read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo)
    return fields.get("model name") or fields.get("Model") or fields.get("Hardware") or platform.machine() or "CPU"


def _isa(cpuinfo: str) -> tuple[str, ...]:
    fields = _fields(cpuinfo)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return tuple(name for name in _ISA if name in flags)


def _cores(cpus: Path, allowed: list[int]) -> int:
    """Count cores; hyper-threads of one core share (package, core)."""
    seen = set()
    for cpu in allowed:
        package, core = (
            _read(cpus / f"cpu{cpu}/topology/{name}").strip() for name in ("physical_package_id", "core_id")
        )
        seen.add((package, core) if core else cpu)
    return max(1, len(seen))


def _cgroup(folder: Path) -> tuple[int, int]:
    """Return limit and use of memory in bytes (cgroup 2, else 1); 0 where there is no limit."""
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, used in pairs:
        text, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if text.isdigit():
            return int(text), int(now) if now.isdigit() else 0
    return 0, 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, str]:
    """Return ``name : value`` lines; the first of a name counts."""
    result: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            result.setdefault(name.strip(), value.strip())
    return result


def _kib(text: str) -> int:
    number = text.split()[0] if text else ""
    return int(number) * 1024 if number.isdigit() else 0
