"""What a run says about itself: one stream of events, a file of them, and whoever listens.

The training loop emits events (:mod:`surogate.track.events` lists them); the JSON Lines file and the terminal are fed
from the same stream, so nothing is shown that is not recorded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from surogate.errors import UserError
from surogate.track.events import Events

if TYPE_CHECKING:
    from surogate.config.schema import TrainConfig

__all__ = ["EVENTS_FILE", "Events", "start"]

EVENTS_FILE = "events.jsonl"


@contextlib.contextmanager
def start(config: TrainConfig, mode: str) -> Iterator[Events]:
    """Open the event stream of a run: a file in ``output_dir`` and the display on the terminal.

    Emits ``run_start``; if the body raises, also ``run_end`` with the reason, and the exception goes on. A run that
    comes to its end emits ``run_end`` itself, since only it knows what was made.

    Args:
        config: of the run.
        mode: ``sft`` or ``pt``.

    Raises:
        UserError: the file cannot be written.
    """
    from surogate import __version__
    from surogate.track.progress import RunDisplay

    directory = Path(config.output_dir)
    display = RunDisplay(sys.stdout, logging_steps=config.logging_steps)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        events = Events(directory / EVENTS_FILE, listeners=[display])
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written: {error.strerror}",
            where=config.where("output_dir"),
            expected="a folder that this user may write to",
            fix="choose another output_dir",
        ) from None
    with events, display:
        name = config.run_name or directory.resolve().name
        events.emit("run_start", mode=mode, run_name=name, output_dir=str(directory), version=__version__)
        try:
            yield events
        except KeyboardInterrupt:
            events.emit("run_end", status="interrupted")
            raise
        except BaseException as error:
            events.emit("run_end", status="failed", error=str(error) or type(error).__name__)
            raise
