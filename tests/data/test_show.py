"""``surogate tokenize``: what it prints is what the model sees, and how full the sequences are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from surogate.cli import main
from surogate.cli.tokenize import shown
from surogate.data import DataOptions, DatasetSpec, Tokenizer, prepare
from tests.data.samples import STYLES, TURNS, chat, write_rows


def show(tmp_path: Path, style: str, *rows: dict, sequence_len: int = 512, colour: bool = False) -> list[str]:
    tokenizer = Tokenizer(STYLES[style].write(tmp_path / style))
    path = write_rows(tmp_path / "rows.jsonl", list(rows))
    options = DataOptions(
        [DatasetSpec(str(path))], tmp_path / "cache", sequence_len=sequence_len, truncation="split", num_workers=1
    )
    train = prepare(options, tokenizer, lambda line: None).train
    return ["".join(shown(train, number, tokenizer, sequence_len, colour)) for number in range(train.rows)]


def test_rows_with_what_is_trained_between_marks(tmp_path: Path) -> None:
    (text,) = show(tmp_path, "chatml", {"messages": TURNS})
    head, body = text.split("\n", 1)
    assert head.startswith(f"--- {tmp_path}/rows.jsonl:1: ") and head.endswith(" trained")
    assert body == (
        "<|im_start|>user\nSay one<|im_end|>\n<|im_start|>assistant\n[[one<|im_end|>]]\n"
        "<|im_start|>user\nSay one again<|im_end|>\n<|im_start|>assistant\n[[one<|im_end|>]]\n"
    )


def test_spaces_at_the_edge_of_a_run_are_kept(tmp_path: Path) -> None:
    """A SentencePiece-like decoder drops the first space of what it is given; the whole text has it.

    The second space is the one that such a tokenizer puts before every text between special tokens.
    """
    (text,) = show(tmp_path, "mistral", {"messages": TURNS})
    assert text.split("\n", 1)[1] == (
        "<s>[INST]  Say one [/INST][[  one</s>]][INST]  Say one again [/INST][[  one</s>]]"
    )


def test_colours_and_pictures_of_control_characters(tmp_path: Path) -> None:
    (text,) = show(tmp_path, "chatml", chat("user: a\x1b[2Jb\x9b", "assistant: ring\x07"), colour=True)
    assert "a␛[2Jb␦" in text and "\x1b[32mring␇<|im_end|>\x1b[0m" in text
    assert text.count("\x1b") == 4  # the head and the one run


def test_edges_of_sequences_are_shown_where_a_row_is_split(tmp_path: Path) -> None:
    (text,) = show(tmp_path, "chatml", chat("user: a", "assistant: " + "0 1 2 3 4 5 6 7 " * 4), sequence_len=24)
    parts = text.split("\n", 1)[1].split("\n--- the next sequence goes on\n")
    assert len(parts) > 2 and all(part.startswith("[[") for part in parts[1:-1])
    assert "".join(parts).replace("[[", "").replace("]]", "") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" + "0 1 2 3 4 5 6 7 " * 4 + "<|im_end|>\n"
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = STYLES["chatml"].write(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 420}))
    rows = [chat(f"user: ask {i}", f"assistant: {'word ' * (i % 9)}end") for i in range(60)]
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": str(model),
                "cache_dir": str(tmp_path / "cache"),
                "sequence_len": 128,
                "datasets": [{"path": str(write_rows(tmp_path / "rows.jsonl", rows))}],
            }
        )
    )
    return path


def test_the_command_reports_rows_lengths_and_positions(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(config), "--show", "2"]) == 0
    output = capsys.readouterr().out
    assert "rows 60, kept 60" in output and "row lengths" in output
    line = next(line for line in output.splitlines() if line.startswith("first epoch:"))
    sequences, used = int(line.split()[2]), float(line.split("positions, ")[1].split("%")[0])
    tokens = int(next(line for line in output.splitlines() if "tokens" in line).split()[1].rstrip(",").replace(",", ""))
    assert used == pytest.approx(100 * tokens / (128 * sequences), abs=0.06) and used > 90
    assert output.count("\n--- ") == 2 and "[[end<|im_end|>]]" in output and "\x1b" not in output


def test_without_packing_fewer_positions_are_used(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(config), "sample_packing=false"]) == 0
    assert "first epoch: 60 sequences of 128 positions" in capsys.readouterr().out


def test_keys_of_the_configuration_reach_the_data(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(config), "train_on=[user]", "--show", "1"]) == 0
    assert "<|im_start|>user\n[[ask 0<|im_end|>]]\n<|im_start|>assistant\nend<|im_end|>" in capsys.readouterr().out
    assert main(["tokenize", str(config), "min_supervised_share=0.9"]) == 2
    assert "expected: at least 90.0%" in capsys.readouterr().err
    template = config.parent / "t.jinja"
    template.write_text("{% for m in messages %}{{ mood ~ m.role ~ ': ' ~ m.content ~ '<|im_end|>' }}{% endfor %}")
    options = [f"chat_template={template}", "chat_template_kwargs={mood: calm}"]
    assert main(["tokenize", str(config), *options, "--show", "1"]) == 0
    assert "calmuser: ask 0<|im_end|>calmassistant: [[end<|im_end|>]]" in capsys.readouterr().out
    bad = config.parent / "bad.jsonl"
    write_rows(bad, [chat("user: a", "assistant: b")] * 9 + [{"messages": None}])
    assert main(["tokenize", str(config), f"datasets.0.path={bad}"]) == 0
    assert main(["tokenize", str(config), f"datasets.0.path={bad}", "max_invalid_share=0.05"]) == 2
    assert "1 of 10 rows cannot be read" in capsys.readouterr().err
