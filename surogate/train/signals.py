"""Signals that ask a run to stop: the first ends it after the step that runs, with a checkpoint; the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from surogate.errors import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOW = 2  # so many SIGINT stop at once


class StopRequest:
    """What signals have asked for so far. ``number``: the first signal's, or None."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def error(self, step: int) -> KeyboardInterrupt:
        """What ends the run after ``step``: :class:`Terminated` for SIGTERM, else ``KeyboardInterrupt``."""
        message = f"stopped after step {step}"
        return Terminated(message) if self.number == signal.SIGTERM else KeyboardInterrupt(message)


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Listen to SIGINT and SIGTERM within the block; outside the main thread, where Python allows none, to nothing.

    Python's handlers run only when a step has come back from the engine. A second SIGINT must not wait for that, so
    a thread reads the numbers as the system writes them, and ends the process with 130 at once. That harms nothing:
    checkpoints and results get their names when they are whole.
    """
    asked = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.number = asked.number or number

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reading,), daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)  # ends the thread
        thread.join()
        os.close(reading)


def _watch(reading: int) -> None:
    interrupts = asked = 0
    while received := os.read(reading, 64):
        interrupts += received.count(signal.SIGINT)
        if interrupts >= _NOW:
            print("\nsurogate: stopped at once; checkpoints that were complete are whole", file=sys.stderr, flush=True)
            os._exit(130)
        if not asked and any(number in _SIGNALS for number in received):
            asked = 1
            print(
                "\nsurogate: stopping after this step, with a checkpoint; Ctrl-C once more stops at once",
                file=sys.stderr,
                flush=True,
            )
