"""What both sides of the comparison share: the task, the tokens, and how a side talks to benchmarks/run.py."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What is trained. ``mode``: ``lora`` (on every linear layer) or ``full``. ``model``: folder of a Hugging Face
    model. Every token but a sequence's first is a target."""

    model: str
    mode: str
    batch: int
    sequence_len: int
    threads: int
    steps: int  # at most, warm-up and profile included
    rank: int = 16
    learning_rate: float = 1e-5
    max_grad_norm: float = 1.0
    recompute: str = ""  # ours alone; empty: the default of `surogate sft`
    seed: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def tokens(self, vocabulary: int) -> np.ndarray:
        """int32 [steps, batch, sequence_len], the same on both sides."""
        shape = (self.steps, self.batch, self.sequence_len)
        return np.random.default_rng(self.seed).integers(0, vocabulary, shape, np.int32)


def task() -> Task:
    """The task that the command line holds."""
    return Task(**json.loads(sys.argv[1]))


def vocabulary_of(model: str) -> int:
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def peak_rss() -> int:
    """Largest resident set of this process, bytes (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(ready: dict[str, Any], step: Callable[[], float], more: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Answer requests until the input ends.

    Args:
        ready: the first line, sent when the side is loaded.
        step: one optimizer step; returns the loss. The request ``step`` answers with its ``seconds``, ``processor``
            (seconds of all threads), ``loss``, and ``rss`` (the peak until now, bytes).
        more: further requests by name.
    """
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        request = line.strip()
        if request == "step":
            begin, busy = time.perf_counter(), processor_seconds()
            loss = step()
            seconds, processor = time.perf_counter() - begin, processor_seconds() - busy
            answer = {"seconds": seconds, "processor": processor, "loss": loss, "rss": peak_rss()}
        else:
            answer = more[request]()
        print(json.dumps(answer), flush=True)
