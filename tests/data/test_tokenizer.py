"""The tokenizer's files are read as transformers reads them, and are written so that it reads the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from surogate.data import Tokenizer
from surogate.data.template import TemplateRefusal
from surogate.errors import UserError
from tests.data.samples import STYLES, TOOL, TURNS, write_tokenizer


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, object]:
    folder = STYLES["llama3"].write(tmp_path_factory.mktemp("bos"))
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_texts_get_the_ids_of_transformers(text: str, with_bos: tuple) -> None:
    ours, theirs = with_bos
    whole = ours.encode(text, add_special_tokens=True)
    assert whole.ids == theirs(text)["input_ids"]
    assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode(text).ids) == text
    assert len(whole.ids) == len(whole.offsets)
    covered = {place for start, end in whole.offsets for place in range(start, end)}
    assert covered == set(range(len(text)))  # every character belongs to a token, spaces too


def test_special_ids(with_bos: tuple) -> None:
    ours, theirs = with_bos
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.pad_id == ours.eos_id and ours.prefix_ids == [ours.bos_id] and ours.suffix_ids == []
    assert ours.vocab_size == len(theirs)
    assert set(ours.special_tokens) == set(theirs.all_special_tokens) | set(STYLES["llama3"].special)


def test_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["pad_token"] = {"content": "<pad>", "__type": "AddedToken", "lstrip": False, "rstrip": False,
                           "normalized": False, "single_word": False, "special": True}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.pad_id == theirs.pad_token_id == theirs.convert_tokens_to_ids("<pad>")
    assert ours.encode("a<pad>b").ids == theirs("a<pad>b", add_special_tokens=False)["input_ids"]


def test_templates_in_the_configuration_and_for_tools(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | tojson(indent=2) }}{{ messages[0].content }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template(TURNS, tools=tools, tokenize=False)
        assert ours.render_chat(TURNS, tools=tools) == expected
    # A file of its own wins over the configuration.
    (folder / "chat_template.jinja").write_text("F{{ messages[0].content }}")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokenizer(folder).render_chat(TURNS) == theirs.apply_chat_template(TURNS, tokenize=False) == "FSay one"


def test_helpers_of_templates_equal_transformers(tmp_path: Path) -> None:
    source = (
        "{{ strftime_now('%Y') }}{{ {'é': '<&>', 'n': none} | tojson }}{{ messages[0] | tojson(sort_keys=true) }}"
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% if loop.index0 == 3 %}{% break %}"
        "{% endif %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.name is defined }}{% endfor %}\n"
        "   {% set ns = namespace(x=1) %}\n{% set ns.x = 2 %}\n  {{ ns.x }}{{ documents is none }}{{ greeting }}\n"
    )
    folder = write_tokenizer(tmp_path, template=source)
    turns = [{**TURNS[0], "reasoning": "why", "name": None}, *TURNS[1:]]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False, greeting="hi")
    assert Tokenizer(folder).render_chat(turns, greeting="hi") == expected


def test_a_template_cannot_reach_beyond_its_sandbox(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(TemplateRefusal):
        Tokenizer(folder).render_chat(TURNS)


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_saved_files_read_the_same(name: str, tmp_path: Path) -> None:
    ours = Tokenizer(STYLES[name].write(tmp_path / "a"))
    ours.save(tmp_path / "b")
    again, theirs = Tokenizer(tmp_path / "b"), AutoTokenizer.from_pretrained(tmp_path / "b")
    assert again.fingerprint() == ours.fingerprint()
    assert again.render_chat(TURNS) == ours.render_chat(TURNS) == theirs.apply_chat_template(TURNS, tokenize=False)
    text = "Say one, two\n"
    assert again.encode(text, True).ids == ours.encode(text, True).ids == theirs(text)["input_ids"]


def test_older_files_are_converted_by_transformers_and_said_so(tmp_path: Path) -> None:
    source = write_tokenizer(tmp_path / "new")
    content = json.loads((source / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    (old / "config.json").write_text('{"model_type": "gpt2"}')
    said: list[str] = []
    ours = Tokenizer.load(old, said.append)
    assert ours.encode("Say one").ids == AutoTokenizer.from_pretrained(old)("Say one")["input_ids"]
    assert "transformers" in said[0]
    ours.save(tmp_path / "saved")
    assert Tokenizer(tmp_path / "saved").encode("Say one").ids == ours.encode("Say one").ids


def test_a_gguf_file_is_a_tokenizer_too(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    from tests.io.test_gguf_tokenizer import byte_level, gpt2_file

    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    gpt2_file(tmp_path / "m.gguf", "gpt-2", tokens, merges, chat_template=STYLES["chatml"].template)
    ours = Tokenizer.load(tmp_path / "m.gguf")
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ours.render_chat(TURNS) == theirs.apply_chat_template(TURNS, tokenize=False)
    assert ours.encode("The quick fox").ids == theirs("The quick fox", add_special_tokens=False)["input_ids"]


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no tokenizer.json"):
        _ = Tokenizer(tmp_path).backend
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer file"):
        _ = Tokenizer(tmp_path).backend
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json: not valid JSON"):
        Tokenizer(tmp_path)
