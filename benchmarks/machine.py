"""Ceilings of this machine, measured by the engine itself: what a benchmark sets its figures against."""

from __future__ import annotations

import os
import time
from pathlib import Path

from surogate import _native
from surogate.compile.program import Instruction, TensorRef
from surogate.track.machine import Machine

PRODUCT = (2048, 2048, 2048)
_COPIED = 1 << 28


def product_rate(threads: int) -> float:
    """flop/s of a large float32 matrix product, its rows split between the threads; best of four."""
    return float(_native.sgemm_rate(threads, *PRODUCT))


class CopyRate:
    """Bytes read and written a second by a copy of 256 MiB. The memory is taken once."""

    def __init__(self, threads: int) -> None:
        self.engine = _native.Engine("cpu", threads)
        self.engine.allocate("device", 2 * _COPIED)
        source, target = (TensorRef("device", at, "u8", (_COPIED,), (1,)) for at in (0, _COPIED))
        self.engine.load("copy", [Instruction("copy", [source], [target], None, {}).tuple()], {}, 0)
        self.engine.run("copy")  # pages arrive

    def __call__(self) -> float:
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            self.engine.run("copy")
            seconds.append(time.perf_counter() - begin)
        return 2 * _COPIED / min(seconds)


def describe() -> str:
    here = Machine.here()
    return f"{here.name}, {here.cores} cores ({', '.join(here.isa)}), {here.memory / 2**30:.0f} GiB"


def busy_seconds() -> float:
    """Processor seconds that everybody has used since the machine started, and that its host took away."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(seconds: float, interval: float = 0.5) -> None:
    """Return when nothing has run for a moment, or after so many seconds."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        before = busy_seconds()
        time.sleep(interval)
        if busy_seconds() - before <= 0.06 * interval * (os.cpu_count() or 1):
            return
