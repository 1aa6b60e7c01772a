"""``surogate init``: what it writes runs as it is, and says what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surogate.cli import main
from surogate.config import load_config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.train.support import write_model, write_rows  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def test_what_is_written_trains(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = write_rows(tmp_path / "rows ${x} #1.jsonl", 12)
    assert main(["init", str(model), str(rows)]) == 0
    said = capsys.readouterr().out
    assert "surogate sft config.yaml" in said and not (tmp_path / "cache").exists()
    config, _ = load_config("config.yaml")
    assert config.datasets[0].path == str(rows) and config.lora
    assert main(["sft", "config.yaml", "max_steps=1", "cpu_threads=1"]) == 0
    assert (Path(config.output_dir) / "adapter_model.safetensors").is_file()


def test_running_text_is_for_pt_and_long_rows_are_counted(tmp_path: Path, model: Path, capsys) -> None:
    text, chat = tmp_path / "text.jsonl", tmp_path / "chat.jsonl"
    text.write_text("".join(json.dumps({"text": "a b c " * n}) + "\n" for n in range(1, 9)))
    assert main(["init", str(model), str(text), "-o", str(tmp_path / "t.yaml")]) == 0
    assert "surogate pt" in capsys.readouterr().out
    turns = [{"instruction": "say", "output": "word " * n} for n in (1, 2, 9000)]
    chat.write_text("".join(json.dumps(row) + "\n" for row in turns))
    assert main(["init", str(model), str(chat), "-o", str(tmp_path / "c.yaml")]) == 0
    written = (tmp_path / "c.yaml").read_text()
    assert "; 1 rows are longer" in written and "type: instruction" in written
    config, _ = load_config(str(tmp_path / "c.yaml"))
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert config.sequence_len == min(4096, limit)


def test_nothing_is_overwritten(tmp_path: Path, model: Path, capsys) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("precious")
    assert main(["init", str(model), "x.jsonl", "-o", str(path)]) == 2
    assert path.read_text() == "precious" and "fix: name another one" in capsys.readouterr().err


def test_mistakes_write_nothing(tmp_path: Path, model: Path, capsys) -> None:
    path = tmp_path / "c.yaml"
    assert main(["init", str(model), str(tmp_path / "absent.jsonl"), "-o", str(path)]) == 2
    assert "there is no file" in capsys.readouterr().err and not path.exists()
