"""Rows of every format become the right example, or are refused with the right words."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate.data.formats import BadRow, Completion, Text, Tokens, format_names, formats, get_format
from surogate.data.formats.auto import choose
from surogate.errors import UserError

SAMPLES = {
    "instruction": {"instruction": "Add", "input": "1 2", "output": "3"},
    "conversation": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    "prompt_completion": {"prompt": "2+2=", "completion": "4"},
    "text": {"text": "once"},
    "pretokenized": {"input_ids": [1, 2], "labels": [-100, 2]},
}


def convert(form: str, row: dict, **fields: str):
    return get_format(form).convert(row, fields)


def turns(form: str, row: dict, **fields: str) -> list[tuple[str, str]]:
    return [(m["role"], m.get("content")) for m in convert(form, row, **fields).messages]


def test_every_file_of_the_folder_is_a_format_with_a_sample() -> None:
    assert set(SAMPLES) == set(format_names()) == {entry.name for entry in formats()}
    assert all(entry.summary for entry in formats())


@pytest.mark.parametrize("name", SAMPLES)
def test_auto_finds_each_format_and_says_by_what(name: str) -> None:
    form, reason = choose([SAMPLES[name]], {}, "rows")
    assert form.name == name and next(iter(SAMPLES[name])) in reason


def test_auto_on_layouts_of_well_known_data_sets() -> None:
    chats = {"prompt": "hi", "prompt_id": "1", "messages": [{"role": "user", "content": "hi"}]}
    alpaca = {"instruction": "a", "input": "", "output": "b", "text": "a b"}
    assert choose([chats], {}, "rows")[0].name == "conversation"
    assert choose([alpaca], {}, "rows")[0].name == "instruction"
    assert choose([{"messages": "free text", "text": "x"}], {}, "rows")[0].name == "text"
    assert (
        choose([{"frage": "x", "antwort": "y"}], {"instruction_field": "frage", "output_field": "antwort"}, "rows")[
            0
        ].name
        == "instruction"
    )


def test_auto_takes_what_most_rows_are() -> None:
    rows = [SAMPLES["text"], *[SAMPLES["instruction"]] * 3]
    assert choose(rows, {}, "rows")[0].name == "instruction"


def test_auto_names_the_fields_it_found() -> None:
    with pytest.raises(UserError, match="found: a, b"):
        choose([{"a": 1}, {"b": 2}], {}, "rows")
    with pytest.raises(UserError, match="preference"):
        choose([{"chosen": "x", "rejected": "y"}], {}, "rows")


def test_instruction() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief"}
    assert turns("instruction", row) == [("system", "Be brief"), ("user", "Add\n\n1 2"), ("assistant", "3")]
    assert turns("instruction", {"question": "q", "answer": "a", "input": None}) == [("user", "q"), ("assistant", "a")]
    mine = {"q": "Q", "c": "C", "a": "A", "s": "S", "instruction": "no"}
    named = {"instruction_field": "q", "input_field": "c", "output_field": "a", "system_field": "s"}
    assert turns("instruction", mine, **named) == [("system", "S"), ("user", "Q\n\nC"), ("assistant", "A")]


def test_roles_and_keys_of_conversations() -> None:
    row = {
        "system": "S",
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "c"},
            {"from": "Assistant", "value": "d"},
        ],
    }
    messages = convert("conversation", row).messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "assistant", "tool", "assistant"]
    assert messages[3]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert "content" not in messages[3]


def test_parts_flags_and_stored_json() -> None:
    row = {
        "messages": '[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},'
        '{"role": "assistant", "content": "c", "weight": 0, "name": null, "mood": "good"}]',
        "tools": '[{"type": "function", "function": {"name": "f", "strict": null}}]',
        "chat_template_kwargs": {"enable_thinking": False},
    }
    example = convert("conversation", row)
    assert example.messages[0]["content"] == "ab"
    assert example.messages[1] == {"role": "assistant", "content": "c", "mood": "good", "train": False}
    assert example.tools == [{"type": "function", "function": {"name": "f"}}]
    assert example.variables == {"enable_thinking": False}


def test_prompt_completion_as_text_and_as_turns() -> None:
    assert convert("prompt_completion", {"prompt": "a", "completion": " b"}) == Completion("a", " b")
    example = convert(
        "prompt_completion",
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
    )
    assert example.completion_from == 1 and len(example.messages) == 2


def test_text_and_named_field() -> None:
    assert convert("text", {"text": "no", "body": "yes"}, text_field="body") == Text("yes")


def test_pretokenized() -> None:
    assert convert("pretokenized", {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}) == Tokens(
        [5, 6, 7], [False, True, True]
    )
    padded = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}
    assert convert("pretokenized", padded) == Tokens([5, 6], [True, True])
    assert convert("pretokenized", {"input_ids": [5, 6], "completion_mask": [0, 1]}).targets == [False, True]


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        ("instruction", {"instruction": "a"}, "no field 'output'"),
        ("instruction", {"instruction": "a", "output": None}, "'output' is null, not text"),
        ("instruction", {"instruction": "a", "output": 3}, "'output' is a number, not text"),
        ("instruction", {"instruction": "a", "output": " "}, "'output' is empty"),
        ("conversation", {"messages": None}, "'messages' is null, not a list of turns"),
        ("conversation", {"messages": []}, "'messages' has no turns"),
        ("conversation", {"messages": ["hi"]}, "a turn is text, not an object"),
        ("conversation", {"messages": [{"content": "x"}]}, "a turn has no role"),
        ("conversation", {"messages": [{"role": "alien", "content": "x"}]}, "unknown role 'alien'"),
        ("conversation", {"messages": [{"role": "user", "content": None}]}, "a turn's content is null"),
        ("conversation", {"messages": [{"role": "user", "content": {"a": 1}}]}, "content is an object, not text"),
        (
            "conversation",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "content is image_url, not text",
        ),
        (
            "conversation",
            {"messages": [{"role": "assistant", "content": "x", "train": "maybe"}]},
            "neither true nor false",
        ),
        ("prompt_completion", {"prompt": "a"}, "no field 'completion'"),
        ("text", {"text": ""}, "'text' is empty"),
        ("pretokenized", {"input_ids": [1, 2], "labels": [2, -100]}, "are they shifted"),
        ("pretokenized", {"input_ids": [1, 2], "labels": [1]}, "not as long"),
        ("pretokenized", {"input_ids": [1, -2]}, "negative id"),
        ("pretokenized", {"input_ids": [1, 2.5]}, "not whole numbers"),
        ("pretokenized", {"input_ids": []}, "is empty"),
    ],
)
def test_rows_that_cannot_be_meant(form: str, row: dict, words: str) -> None:
    with pytest.raises(BadRow, match=words):
        convert(form, row)


def test_the_page_names_every_format_and_template() -> None:
    from surogate.data.named import named_templates

    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in [*format_names(), *named_templates()])
