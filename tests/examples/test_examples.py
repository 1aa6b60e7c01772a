"""The shipped examples: configurations load, the data is what its script makes, and nothing leaks into the held-out."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from surogate.config import check_mode, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_configuration_loads(path: Path) -> None:
    config, _ = load_config(str(path))
    check_mode(config, "pt" if config.from_scratch else "sft")
    for source in config.datasets:
        if source.path.startswith("examples/"):
            assert (EXAMPLES.parent / source.path).is_file()


def test_data_is_what_the_script_makes(tmp_path: Path) -> None:
    script("make_events").main(tmp_path)
    for name in ("events.jsonl", "events-heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes(), "run: python examples/make_events.py"


def test_answers_follow_from_the_notes() -> None:
    train, held_out = rows("events.jsonl"), rows("events-heldout.jsonl")
    assert 300 <= len(train) <= 400 and len({row["input"] for row in train}) == len(train)
    for row in train + held_out:
        event = json.loads(row["output"])
        assert list(event) == ["who", "what", "when", "where"]
        assert row["output"] == json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        for value in event.values():
            assert value is None or value.lower() in row["input"].lower()


def test_held_out_shares_no_name_place_or_occasion() -> None:
    train = [json.loads(row["output"]) for row in rows("events.jsonl")]
    for row in rows("events-heldout.jsonl"):
        event = json.loads(row["output"])
        for key in ("who", "what", "where"):
            assert event[key] is None or event[key] not in {other[key] for other in train}


def test_quickstart_names_what_its_configuration_has() -> None:
    quickstart = script("quickstart")
    config, _ = load_config(str(EXAMPLES / "quickstart.yaml"))
    assert (config.model, config.output_dir) == (quickstart.MODEL, quickstart.OUTPUT)


def test_quickstart_counts() -> None:
    quickstart = script("quickstart")
    expected = rows("events-heldout.jsonl")[:3]
    texts = [expected[0]["output"], '{"who": "x"}', "Sure! Here is"]
    assert (quickstart.valid(texts), quickstart.right(expected, texts)) == (2, 1)
