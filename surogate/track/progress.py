"""The display of a run: fed by its events and by nothing else.

Start-up is told line by line, in a fixed order. Then, on a terminal, one live bar; elsewhere a line every
``logging_steps`` steps. ``rich`` is imported only where there is a terminal.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import IO, Any

Fields = Mapping[str, Any]


class RunDisplay:
    """Shows a run on ``stream``. A listener of :class:`surogate.track.events.Events`.

    Args:
        stream: where to write.
        logging_steps: steps between two lines, where there is no terminal; each line has their mean loss.
        terminal: whether ``stream`` is one; None: ask it.
    """

    def __init__(self, stream: IO[str], logging_steps: int = 1, terminal: bool | None = None) -> None:
        self.stream = stream
        self.logging_steps = max(1, logging_steps)
        self.terminal = stream.isatty() if terminal is None else terminal
        self.seconds: list[float] = []  # of the last steps, for the time left
        self.losses: list[float] = []  # since the last line
        self.output_dir = ""
        self._broken = False  # nobody reads any more (a closed pipe); the run goes on all the same
        self._live: _Live | None = None

    def __call__(self, event: str, fields: Fields) -> None:
        handle = getattr(self, f"_on_{event}", None)
        if handle is not None:
            handle(fields)

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the terminal; what was printed stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        if self._broken:
            return
        try:
            if self._live is not None:
                self._live.print(text)
            else:
                self.stream.write(text + "\n")
                self.stream.flush()
        except OSError:
            self._broken = True

    # -- start, in the order in which these events come --------------------------------------------------------------

    def _on_run_start(self, e: Fields) -> None:
        self.output_dir = e["output_dir"]

    def _on_config(self, e: Fields) -> None:
        self.line(f"Configuration loaded: {e.get('path') or 'given in Python'}")

    def _on_device(self, e: Fields) -> None:
        threads = e["threads"]
        self.line(f"Device found: {e['kind'].upper()}: {e['name']}, {threads} thread{'s' if threads != 1 else ''}")

    def _on_progress(self, e: Fields) -> None:
        self.line(e["message"])

    def _on_model(self, e: Fields) -> None:
        parameters = count(e["parameters"])
        self.line(f"Model loaded: {e['name']} ({e['architecture']}, {parameters} parameters) in {e['seconds']:.1f} s")
        if e["trainable"] == e["parameters"]:
            self.line(f"Full training: all {parameters} parameters are trained")

    def _on_adapter(self, e: Fields) -> None:
        share = e["trainable"] / e["parameters"] if e["parameters"] else 0.0
        dropout = f", dropout={e['dropout']:g}" if e.get("dropout") else ""
        self.line(
            f"LoRA initialised: rank={e['rank']}, alpha={e['alpha']:g}{dropout}, modules: {', '.join(e['modules'])}; "
            f"{count(e['trainable'])} of {count(e['parameters'])} parameters are trained ({share:.2%})"
        )

    def _on_data(self, e: Fields) -> None:
        for line in e.get("lines", ()):
            self.line(line)

    def _on_batch(self, e: Fields) -> None:
        self.line(
            f"Effective batch size: {e['effective']} (per_device={e['per_device']}, accumulation={e['accumulation']}), "
            f"{e['tokens']:,} tokens a step, {e['steps']:,} steps in {plural(e['epochs'], 'epoch')}"
        )

    def _on_memory(self, e: Fields) -> None:
        self.line(f"Memory planned: {size(e['total'])}")
        width = max((len(purpose) for purpose in e["table"]), default=0)
        for purpose, nbytes in e["table"].items():
            self.line(f"  {purpose:<{width}}  {size(nbytes):>10}")

    def _on_resume(self, e: Fields) -> None:
        self.line(f"Resumed: {e['path']}, after step {e['step']:,}")

    # -- the run -----------------------------------------------------------------------------------------------------

    def _on_step(self, e: Fields) -> None:
        self.seconds = [*self.seconds[-19:], e["seconds"]]
        if e["loss"] is not None:
            self.losses.append(e["loss"])
        left = (e["total"] - e["step"]) * sum(self.seconds) / len(self.seconds)
        if self.terminal:
            if self._live is None:
                self._live = _Live(self.stream)
            if not self._broken:
                self._live.step(e, left)
            return
        if e["step"] % self.logging_steps == 0 or e["step"] == e["total"]:
            loss = sum(self.losses) / len(self.losses) if self.losses else None
            self.losses = []
            place = f"epoch {e['epoch']}/{e['epochs']} step {e['step']}/{e['total']}"
            self.line("  ".join([place, *metrics(e, loss), f"{duration(left)} left"]))

    def _on_eval(self, e: Fields) -> None:
        loss = "nan" if e["loss"] is None else f"{e['loss']:.4f}"
        self.line(f"evaluation at step {e['step']}: loss {loss} over {e['targets']:,} tokens in {e['seconds']:.1f} s")

    def _on_checkpoint(self, e: Fields) -> None:
        self.line(f"checkpoint: {e['path']} ({e['seconds']:.1f} s)")

    def _on_warning(self, e: Fields) -> None:
        self.line(f"warning: {e['message']}")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _on_run_end(self, e: Fields) -> None:
        self.close()
        if e.get("status", "done") != "done":
            return  # the command line tells what went wrong, and where the newest checkpoint is
        self.line(f"Done after {plural(e['steps'], 'step')}. The {e['kind']} is in {e['path']}")
        self.line(f"Every figure of the run is in {self.output_dir or e['path']}/events.jsonl")
        if e["kind"] == "adapter":
            self.line("Next: fold it into its base model, for tools that take one model:")
            self.line(f"  surogate merge {shlex.quote(e['path'])} {shlex.quote(e['path'].rstrip('/') + '-merged')}")
        else:
            self.line("Next: load it with any Hugging Face tool, for instance")
            self.line(f"  AutoModelForCausalLM.from_pretrained({e['path']!r})")


class _Live:
    """The bar on a terminal. Drawn when a step ends and never in between: no thread of ours runs inside a step."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=stream, force_terminal=True, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.live.start()

    def step(self, e: Fields, left: float) -> None:
        """Draw the bar after a step."""
        from rich.text import Text

        before, bar, after = bar_line(e, left, self.console.width)
        done = round(len(bar) * e["step"] / e["total"])
        text = Text.assemble(before, (bar[:done], "green"), (bar[done:], "bright_black"), after)
        self.live.update(text, refresh=True)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self.live.stop()


def bar_line(e: Fields, left: float, width: int) -> tuple[str, str, str]:
    """Lay out the bar of a step in ``width`` columns: what stands before it, the bar, what stands after.

    What does not fit is left out, the least important first.
    """
    before = f"epoch {e['epoch']}/{e['epochs']} "
    place = f" {e['step']}/{e['total']}"
    loss, lr, grad, speed, *rest = metrics(e, e["loss"])
    wanted = [loss, f"{duration(left)} left", speed, *rest, grad, lr]
    shown: list[str] = []
    room = width - len(before) - len(place) - 8
    for part in wanted:
        if room < len(part) + 2:
            break
        shown.append(part)
        room -= len(part) + 2
    order = [loss, lr, grad, speed, *rest, f"{duration(left)} left"]
    after = place + "".join(f"  {part}" for part in order if part in shown)
    return before, "━" * max(4, min(24, width - len(before) - len(after))), after


def metrics(e: Fields, loss: float | None) -> list[str]:
    """Return the figures of a step: loss, learning rate, gradient norm, speed, and what else there is to say."""
    parts = [
        f"loss {'nan' if loss is None else f'{loss:.4f}'}",
        f"lr {e['lr']:.2e}",
        f"grad {'nan' if e['grad_norm'] is None else format(e['grad_norm'], '.3g')}",
        f"{e['tokens_per_second'] or 0:,.0f} tokens/s",
    ]
    if e.get("speed_of_light") is not None:
        parts.append(f"SOL {e['speed_of_light']:.0%}")
    wait = e.get("data_wait_seconds") or 0.0
    if e["seconds"] and wait / e["seconds"] >= 0.01:
        parts.append(f"{wait / e['seconds']:.0%} waiting for data")
    return parts


def count(n: int) -> str:
    """Return a number with three figures: ``135M``, ``8.03B``."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= scale:
            value = n / scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"
    return str(n)


def size(nbytes: float) -> str:
    """Return bytes with a binary unit: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


def duration(seconds: float) -> str:
    """Return ``12s``, ``3:05`` or ``2:03:05``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def plural(n: int, word: str) -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{n:,} {word}" + ("" if n == 1 else "s")
