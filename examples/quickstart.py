"""Fine-tune a small model and see what it learnt: ``make quickstart``, or ``python examples/quickstart.py``.

Fetches SmolLM2-135M-Instruct, asks it to turn notes that it never saw into JSON, trains LoRA adapters on
``events.jsonl`` with ``surogate sft examples/quickstart.yaml``, and asks again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "examples/quickstart.yaml"
MODEL, OUTPUT = "quickstart/SmolLM2-135M-Instruct", "quickstart/output"  # as CONFIG has them
SHOWN = 6  # held-out notes; each answer takes a second or two


def main() -> int:
    """Return the exit code."""
    os.chdir(ROOT)
    from surogate.errors import UserError
    from surogate.io.fixtures import fetch_smollm2

    print(f"Fetching the model into {MODEL}", flush=True)
    try:
        fetch_smollm2(MODEL)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [json.loads(line) for line in Path("examples/events-heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = rows[:SHOWN]
    before = answers(rows, None)

    command = [sys.executable, "-m", "surogate", "sft", CONFIG]
    print(f"\n$ surogate sft {CONFIG}", flush=True)
    started = time.monotonic()
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if code:
        return code
    minutes = (time.monotonic() - started) / 60

    after = answers(rows, OUTPUT)
    print("\nNotes that the model has not been trained on, with names and places it has not seen:")
    for row, old, new in zip(rows, before, after, strict=True):
        print(f"\n  note    {row['input']}\n  before  {shorten(old)}\n  after   {shorten(new)}")
    print(f"\nTraining took {minutes:.1f} minutes. Of {len(rows)} answers")
    print(f"  valid JSON          before {valid(before)}, after {valid(after)}")
    print(f"  right in every key  before {right(rows, before)}, after {right(rows, after)}")
    print(f"The adapter is in {OUTPUT}; transformers and PEFT load it as it is.")
    return 0


def answers(rows: Sequence[dict[str, str]], adapter: str | None) -> list[str]:
    """Ask the model, with or without the adapter."""
    from surogate.train.generate import greedy

    prompts = [f"{row['instruction']}\n\n{row['input']}" for row in rows]
    return [text.strip() for text in greedy(MODEL, prompts, adapter=adapter, max_new_tokens=64)]


def valid(texts: Sequence[str]) -> int:
    """Count the texts that are one JSON object."""
    return sum(isinstance(parsed(text), dict) for text in texts)


def right(rows: Sequence[dict[str, str]], texts: Sequence[str]) -> int:
    """Count the texts that say what was expected."""
    return sum(parsed(text) == json.loads(row["output"]) for row, text in zip(rows, texts, strict=True))


def parsed(text: str) -> object:
    """Return the JSON value of ``text``; None if it is no JSON."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value


def shorten(text: str) -> str:
    """Return ``text`` on one line of at most 100 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


if __name__ == "__main__":
    sys.exit(main())
