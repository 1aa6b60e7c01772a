"""The event stream of a run: JSON Lines, one object a line.

Every object has ``event`` (its name) and ``time`` (seconds since 1970, UTC). Numbers that JSON does not have (NaN,
infinities) are written as null. New fields may be added; a reader ignores what it does not know.

=============  =======================================================================================================
event          fields
=============  =======================================================================================================
``run_start``  ``mode`` (sft or pt), ``run_name``, ``output_dir``, ``version`` (of Surogate)
``config``     ``path`` (file, or null), ``config`` (every key, resolved)
``device``     ``kind`` (cpu), ``name``, ``threads``
``progress``   ``message``: one line about what is being prepared (download, tokenizing)
``model``      ``name``, ``architecture``, ``parameters``, ``trainable``, ``seconds`` (to load and compile)
``adapter``    ``kind`` (lora), ``rank``, ``alpha``, ``dropout``, ``modules`` (names of linear layers), ``count`` (of
               adapted layers), ``trainable``, ``parameters`` (of model and adapter). Not emitted in full fine-tuning
``data``       what became of the rows: ``rows_in``, ``rows`` (kept), ``tokens``, ``targets``, ``dropped`` (cause to
               number), ``positions_used`` (share of all positions that hold a token), ``lines`` (text about the order)
``batch``      ``effective`` (sequences a step), ``per_device``, ``accumulation``, ``ranks``, ``sequence_len``,
               ``tokens`` (places for them in a step), ``steps`` (of the run), ``epochs``
``memory``     ``table`` (purpose to bytes), ``total`` (bytes)
``resume``     ``path``, ``step`` (the last one that is done)
``step``       ``step`` (from 1), ``total``, ``epoch`` (from 1), ``epochs``, ``loss`` (nats a target token), ``lr``,
               ``grad_norm`` (before clipping), ``tokens`` (without padding), ``targets``, ``seconds``,
               ``tokens_per_second``, ``speed_of_light`` (share of the measured matrix-product rate, 0 to 1),
               ``data_wait_seconds``
``eval``       ``step``, ``loss`` (nats a target token, over the whole set), ``targets``, ``seconds``
``checkpoint`` ``step``, ``path``, ``seconds``
``warning``    ``message``
``run_end``    ``status`` (done, which is the default, interrupted or failed); when done: ``steps``, ``kind`` (adapter
               or model), ``path`` (of the result); when failed: ``error``
=============  =======================================================================================================

A run that is killed has no ``run_end``. Several runs in one ``output_dir`` follow one another in its file, each from
its ``run_start``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

NAMES = (
    "run_start", "config", "device", "progress", "model", "adapter", "data", "batch", "memory", "resume",
    "step", "eval", "checkpoint", "warning", "run_end",
)  # fmt: skip

Listener = Callable[[str, Mapping[str, Any]], None]


class Events:
    """Writes events to a file and hands them to listeners.

    Args:
        path: a file that lines are added to; None: no file.
        listeners: called with ``(event, fields)``, in order.
        clock: seconds since 1970.

    Raises:
        OSError: the file cannot be opened. Once it is open, a full disk does not stop the run: the file stays behind
            and the listeners are told with one ``warning``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        listeners: Iterable[Listener] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        # Line buffered: a line is with the system when `emit` returns, and survives a killed process.
        self._file = None if path is None else open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._listeners = list(listeners)
        self._clock = clock

    def emit(self, event: str, **fields: Any) -> None:
        """Record one event.

        Args:
            event: one of :data:`NAMES`.
            fields: plain values, NumPy scalars, paths; mappings and sequences of them.
        """
        if event not in NAMES:
            raise ValueError(f"no event is called {event!r}")
        plain = {name: _plain(value) for name, value in fields.items()}
        self._write({"event": event, "time": round(self._clock(), 3), **plain})
        self._tell(event, plain)

    def _tell(self, event: str, fields: Mapping[str, Any]) -> None:
        """Hand an event on. A listener that fails is told nothing more: what only watches must not end a run."""
        for listener in list(self._listeners):
            try:
                listener(event, fields)
            except Exception as error:
                self._listeners.remove(listener)
                message = f"{type(listener).__name__} failed at {event} and is switched off: {error!r}"
                print(f"warning: {message}", file=sys.stderr)
                self.emit("warning", message=message)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            self._discard()
            self._tell("warning", {"message": f"events are no longer written to the file: {error.strerror}"})

    def _discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass  # what could not be written before cannot be written now

    def close(self) -> None:
        """Close the file. Events after that go to the listeners alone."""
        self._discard()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it; anything unknown as its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [_plain(item) for item in items]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, without importing NumPy
        return _plain(value.tolist())
    return str(value)
