"""What a person sees of a run: order of the start, figures of a step, the end."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest

from surogate.track.events import Events
from surogate.track.progress import RunDisplay, count, duration, size

START: list[tuple[str, dict[str, Any]]] = [
    ("run_start", {"mode": "sft", "run_name": "r", "output_dir": "out", "version": "1"}),
    ("config", {"path": "c.yaml", "config": {}}),
    ("device", {"kind": "cpu", "name": "AMD EPYC", "threads": 2}),
    (
        "model",
        {"name": "m", "architecture": "LlamaForCausalLM", "parameters": 139_000_000, "trainable": 4_900_000,
         "seconds": 1.23},
    ),
    (
        "adapter",
        {"kind": "lora", "rank": 16, "alpha": 32.0, "dropout": 0.0, "modules": ["q_proj", "v_proj"], "count": 60,
         "trainable": 4_900_000, "parameters": 139_000_000},
    ),
    ("data", {"lines": ["360 rows, 352 kept"], "rows": 360}),
    (
        "batch",
        {"effective": 32, "per_device": 4, "accumulation": 8, "sequence_len": 256, "tokens": 8192, "steps": 4,
         "epochs": 2},
    ),
    ("memory", {"table": {"weights": 270 * 2**20, "activations": 2**30}, "total": 270 * 2**20 + 2**30}),
]  # fmt: skip


def step(n: int, loss: float | None = 2.0, **more: Any) -> tuple[str, dict[str, Any]]:
    fields = {
        "step": n, "total": 4, "epoch": (n + 1) // 2, "epochs": 2, "loss": loss, "lr": 2e-4, "grad_norm": 1.234,
        "tokens": 8000, "targets": 3000, "seconds": 40.0, "tokens_per_second": 200.0, "speed_of_light": 0.62,
        "data_wait_seconds": 0.0,
    }  # fmt: skip
    return "step", fields | more


def show(events: list[tuple[str, dict[str, Any]]], **options: Any) -> list[str]:
    stream = io.StringIO()
    with RunDisplay(stream, **options) as display, Events(None, [display]) as sink:
        for name, fields in events:
            sink.emit(name, **fields)
    return stream.getvalue().splitlines()


def test_order_of_the_start() -> None:
    assert show(START) == [
        "Configuration loaded: c.yaml",
        "Device found: CPU: AMD EPYC, 2 threads",
        "Model loaded: m (LlamaForCausalLM, 139M parameters) in 1.2 s",
        "LoRA initialised: rank=16, alpha=32, modules: q_proj, v_proj; 4.90M of 139M parameters are trained (3.53%)",
        "360 rows, 352 kept",
        "Effective batch size: 32 (per_device=4, accumulation=8), 8,192 tokens a step, 4 steps in 2 epochs",
        "Memory planned: 1.26 GiB",
        "  weights       270.0 MiB",
        "  activations    1.00 GiB",
    ]


def test_full_training_says_so() -> None:
    model = dict(START[3][1], trainable=139_000_000)
    assert show([("model", model)])[1] == "Full training: all 139M parameters are trained"


def test_plain_lines_have_the_mean_loss_since_the_last() -> None:
    lines = show([step(1, 4.0), step(2, 2.0), step(3, 1.0), step(4, 0.5)], logging_steps=3)
    figures = "lr 2.00e-04  grad 1.23  200 tokens/s  SOL 62%"
    assert lines == [
        f"epoch 2/2 step 3/4  loss 2.3333  {figures}  40s left",
        f"epoch 2/2 step 4/4  loss 0.5000  {figures}  0s left",
    ]


def test_time_left_follows_the_last_steps() -> None:
    (line,) = show([step(1, seconds=100.0)])
    assert line.endswith("5:00 left")


def test_loss_that_is_no_number() -> None:
    (line,) = show([step(1, float("nan"), grad_norm=float("inf"))])
    assert "loss nan" in line and "grad nan" in line


def test_waiting_for_data_is_shown_when_it_matters() -> None:
    assert "waiting" not in show([step(1, data_wait_seconds=0.1)])[0]
    assert "25% waiting for data" in show([step(1, data_wait_seconds=10.0)])[0]


def test_events_between_steps() -> None:
    lines = show(
        [
            ("eval", {"step": 2, "loss": 1.5, "targets": 1234, "seconds": 3.0}),
            ("checkpoint", {"step": 2, "path": "out/checkpoint-2", "seconds": 0.5}),
            ("warning", {"message": "w"}),
            ("resume", {"path": "out/checkpoint-2", "step": 2}),
        ]
    )
    assert lines == [
        "evaluation at step 2: loss 1.5000 over 1,234 tokens in 3.0 s",
        "checkpoint: out/checkpoint-2 (0.5 s)",
        "warning: w",
        "Resumed: out/checkpoint-2, after step 2",
    ]


def test_the_end_names_the_result_and_the_next_command() -> None:
    lines = show([("run_end", {"steps": 4, "kind": "adapter", "path": "my out/"})])
    assert "my out/" in lines[0] and "events.jsonl" in lines[1]
    assert lines[-1] == "  surogate merge 'my out/' 'my out-merged'"
    lines = show([START[0], ("run_end", {"steps": 1, "kind": "model", "path": "out/model"})])
    assert lines[0].startswith("Done after 1 step.") and "from_pretrained('out/model')" in lines[-1]
    assert "out/events.jsonl" in lines[1]


def test_a_run_that_failed_does_not_claim_a_result() -> None:
    assert show([("run_end", {"status": "failed", "error": "x"})]) == []


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    before = threading.active_count()
    stream = io.StringIO()
    with RunDisplay(stream, terminal=True) as display, Events(None, [display]) as sink:
        for name, fields in [
            step(1),
            step(2),
            ("eval", {"step": 2, "loss": 1.5, "targets": 9, "seconds": 3.0}),
            step(3),
        ]:
            sink.emit(name, **fields)
            assert threading.active_count() == before, "no thread may run Python inside a step"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = re.split(r"[\r\n]+", text)
    assert "evaluation at step 2: loss 1.5000 over 9 tokens in 3.0 s" in lines
    last = [line for line in lines if line.startswith("epoch")][-1]
    assert last.startswith("epoch 2/2") and "3/4" in last and len(last) <= columns
    assert "loss 2.0000" in last
    if columns >= 120:
        assert "200 tokens/s" in last and "SOL 62%" in last and "40s left" in last


def test_a_closed_pipe_does_not_stop_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = RunDisplay(Closed())
    for name, fields in [*START, step(1)]:
        display(name, fields)


def test_units() -> None:
    assert [count(n) for n in (0, 999, 1000, 135_000_000, 8_030_000_000)] == ["0", "999", "1.00K", "135M", "8.03B"]
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**30)] == ["0 B", "1,023 B", "1.0 KiB", "3.00 GiB"]
    assert [duration(s) for s in (0.4, 59.6, 61, 3599, 7385)] == ["0s", "1:00", "1:01", "59:59", "2:03:05"]
