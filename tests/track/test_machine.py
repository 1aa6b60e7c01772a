"""What Linux says about a machine, read from copies of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surogate.track.machine import Machine, cpu_name


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_hyper_threads_and_a_containers_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n",
            "proc/meminfo": "MemTotal:       1000000 kB\nMemAvailable:    900000 kB\n",
            "sys/fs/cgroup/memory.max": "104857600\n",
            "sys/fs/cgroup/memory.current": "4857600\n",
        },
    )
    for cpu in range(4):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(tmp_path, {f"{topology}/physical_package_id": "0\n", f"{topology}/core_id": f"{cpu % 2}\n"})
    here = Machine.here(tmp_path)
    assert here == Machine("Some CPU", 2, 4, ("avx2", "fma", "avx512f"), 104857600, 100000000)


def test_no_limit_and_no_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    write(
        tmp_path,
        {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n", "sys/fs/cgroup/memory.max": "max\n"},
    )
    here = Machine.here(tmp_path)
    assert (here.cores, here.logical, here.memory, here.available) == (3, 3, 1024000, 921600)


def test_this_machine() -> None:
    here = Machine.here()
    assert 1 <= here.cores <= here.logical and 0 < here.available <= here.memory and here.name


def test_arm_has_no_model_name() -> None:
    assert cpu_name("processor\t: 0\nModel\t\t: Raspberry Pi 5\n") == "Raspberry Pi 5"
