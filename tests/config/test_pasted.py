"""Configurations pasted from a web page: the line, the place of the first character, and the mended line."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate.config import ConfigErrors, load_config, pasted
from surogate.errors import UserError

# line -> column, name of what was found, mended line
LINES = [
    ("lora_target_modules: [“q_proj”, “k_proj”]", 23, "curly quote “", 'lora_target_modules: ["q_proj", "k_proj"]'),
    ("model: ‘Qwen/Qwen3-0.6B’", 8, "curly quote ‘", "model: 'Qwen/Qwen3-0.6B'"),
    ("sequence_len：2048", 13, "full-width colon ：", "sequence_len: 2048"),
    ("sequence_len： 2048", 13, "full-width colon ：", "sequence_len: 2048"),
    ("lora_target_modules: [q_proj，k_proj]", 29, "full-width comma ，", "lora_target_modules: [q_proj, k_proj]"),
    ("seed:\u300042", 6, "full-width space", "seed: 42"),
    ("seed:\u00a042", 6, "non-breaking space", "seed: 42"),
    ("\u00a0\u00a0seed: 42", 1, "non-breaking space", "  seed: 42"),
    ("\tseed: 42", 1, "tab", "  seed: 42"),
    ("  \tseed: 42", 3, "tab", "    seed: 42"),
    ("seed:\t42", 6, "tab", "seed: 42"),
    ("seed: ４２", 7, "full-width character ４", "seed: 42"),
    ("learning_rate: 2e−4", 18, "minus sign −", "learning_rate: 2e-4"),
    ("– path: d.jsonl", 1, "en dash –", "- path: d.jsonl"),
    ("seed: 42\u200b", 9, "zero width space", "seed: 42"),
    ("run_name: it’s", 13, "curly quote ’", "run_name: it's"),
    ("seed: 42　＃ note", 9, "full-width space", "seed: 42 # note"),
    ("run_name: “a”  # “b”：c", 11, "curly quote “", 'run_name: "a"  # “b”：c'),
]


@pytest.mark.parametrize(("line", "column", "name", "mended"), LINES)
def test_one_line(line: str, column: int, name: str, mended: str) -> None:
    found = pasted.find(f"# first\n{line}\n")
    assert [(p.line, p.column, p.mended) for p in found] == [(2, column, mended)]
    assert found[0].name.startswith(name)
    assert not pasted.find(mended), "what is proposed must itself be clean"


MEANT = [
    "# 训练：“x”，y",
    "seed: 42  # 训练：“x”",
    "run_name: '你好，世界：“x”'",
    'run_name: "你好，世界\u00a0\\" ：“x”"',
    "run_name: 'it''s ：“x”'",
    "output_dir: 输出",
    "chat_template: |\n  你好：“x”\n\n  — y\nseed: 3",
    "chat_template: >-  # note\n  你好：“x”\nseed: 3",
    "run_name: 'two\n  lines：x'",
    "run_name: it's\nseed: 3 # isn’t",
]


@pytest.mark.parametrize("text", MEANT)
def test_characters_that_are_meant_stay(text: str) -> None:
    assert pasted.find(text) == []


def test_straight_quote_closed_by_a_curly_one() -> None:
    assert [(p.line, p.column) for p in pasted.find("seed: 3\nrun_name: \"abc”\nmodel: 'm'\n")] == [(2, 15)]


def test_after_a_block_scalar_the_search_goes_on() -> None:
    assert [(p.line, p.column) for p in pasted.find("chat_template: |\n  ：\nseed：3\n")] == [(3, 5)]


def test_message(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\nlora_target_modules: [“q_proj”, “k_proj”]\nseed：3\n", encoding="utf-8")
    with pytest.raises(ConfigErrors) as caught:
        load_config(str(path))
    assert len(caught.value.errors) == 2
    assert caught.value.errors[0].render() == (
        f"{path}:2:23: curly quote “ (U+201C)\n"
        "  2 | lora_target_modules: [“q_proj”, “k_proj”]\n"
        "    |                       ^\n"
        "  expected: plain '\"' (a value that is meant to hold it goes in straight quotes)\n"
        "  fix: write this line as\n"
        '      lora_target_modules: ["q_proj", "k_proj"]'
    )


def test_caret_counts_wide_characters_as_two_cells() -> None:
    shown = pasted.excerpt(7, 4, "训练x：y")
    assert shown.split("\n")[1] == "    |      ^"


def test_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("\ufeffmodel: m\r\ndatasets: [{path: d}]\r\nseed: 3\r\n".encode())
    assert load_config(str(path))[0].seed == 3


def test_mended_file_loads(tmp_path: Path) -> None:
    """Apply every fix to a page-like config; what comes out is read as its author meant it."""
    text = (
        "# 配置：示例\nmodel：“Qwen/Qwen3-0.6B”　# 模型\nlora: true\nlora_target_modules: [“q_proj”，“v_proj”]\n"
        "datasets:\n\u00a0 - path: “mlabonne/FineTome-100k”\n\u00a0 \u00a0 split: ‘train’\nlearning_rate: 2.0e–4\n"
    )
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        load_config(str(path))
    lines = text.split("\n")
    for p in pasted.find(text):
        lines[p.line - 1] = p.mended
    path.write_text("\n".join(lines), encoding="utf-8")
    config, _ = load_config(str(path))
    assert config.model == "Qwen/Qwen3-0.6B"
    assert config.lora_target_modules == ("q_proj", "v_proj")
    assert (config.datasets[0].path, config.datasets[0].split) == ("mlabonne/FineTome-100k", "train")
    assert config.learning_rate == 2e-4
