"""Conversations to ids and masks: equal to transformers, and equal to what was marked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from surogate.data.chunks import Rows
from surogate.data.encode import RowEncoder
from surogate.data.formats import Chat, get_format
from surogate.data.options import DataOptions
from surogate.data.template import ChatTemplate
from surogate.data.tokenizer import Tokenizer
from surogate.data.turns import TurnFinder, TurnsNotFound
from tests.data.samples import STYLES, SYSTEM, TOOL, TURNS, marked, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for name, style in STYLES.items():
        style.write(root / name)
    return root


@pytest.fixture(scope="module")
def pairs(folder: Path) -> dict[str, tuple[Tokenizer, object]]:
    return {name: (Tokenizer(folder / name), AutoTokenizer.from_pretrained(folder / name)) for name in STYLES}


def encode(tokenizer: Tokenizer, *rows: dict, form: str = "conversation", **options: object):
    """Return the result of encoding some rows."""
    chosen = DataOptions([], Path(), **{"sequence_len": 10_000, **options})  # type: ignore[arg-type]
    return RowEncoder(tokenizer, chosen).encode(Rows(0, "rows", 1, 0, list(enumerate(rows, 1))), get_format(form), {})


def shown(tokenizer: Tokenizer, row: dict, form: str = "conversation", **options: object) -> str:
    """Return a row's text with what is trained between ⟦ and ⟧."""
    result = encode(tokenizer, row, form=form, **options)
    assert not result.dropped, result.dropped
    return marked(tokenizer, result.tokens, result.mask)


def spans(tokenizer: Tokenizer, messages: list[dict], train_on: str = "assistant", **variables: object) -> list[str]:
    """Return the texts that are trained, by characters."""
    rendering = tokenizer.render([{k: v for k, v in m.items() if k != "train"} for m in messages], None, **variables)
    found = TurnFinder(tokenizer).targets(rendering, messages, None, variables, train_on)
    return [rendering.text[start:end] for start, end in found]


@pytest.mark.parametrize("name", STYLES)
def test_ids_equal_transformers_and_masks_equal_the_hand_made_ones(name: str, pairs: dict) -> None:
    style, (ours, theirs) = STYLES[name], pairs[name]
    messages = [SYSTEM, *TURNS] if style.system else TURNS
    result = encode(ours, {"messages": messages})
    assert result.tokens.tolist() == theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    text = theirs.apply_chat_template(messages, tokenize=False)
    assert text == style.expected.replace("⟦", "").replace("⟧", "")
    rendering = ours.render(messages)
    targets = TurnFinder(ours).targets(rendering, messages, None, {}, "assistant")
    for start, end in reversed(targets):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    assert text == style.expected
    trained = [part.split("⟧")[0] for part in style.expected.split("⟦")[1:]]
    runs = np.flatnonzero(np.diff(result.mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert [ours.decode(result.tokens[a:b]).strip() for a, b in runs] == [part.strip() for part in trained]


@pytest.mark.parametrize("name", STYLES)
def test_generation_prompt_equals_transformers(name: str, pairs: dict) -> None:
    ours, theirs = pairs[name]
    expected = theirs.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(TURNS[:1], add_generation_prompt=True) == expected


_text = st.text(st.sampled_from("ab 1\n\t<>[]|é😀{}%'\"\\") | st.characters(codec="utf-8"), min_size=1, max_size=24)


@pytest.mark.parametrize("name", STYLES)
@given(contents=st.lists(_text, min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_text_is_rendered_as_by_transformers(name: str, contents: list[str], pairs: dict) -> None:
    ours, theirs = pairs[name]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    text = theirs.apply_chat_template(messages, tokenize=False)
    rendering = ours.render(messages)
    assert rendering.text == text
    assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"]
    known = [region for region in rendering.regions if region is not None]
    assert all(a[1] <= b[0] for a, b in zip(known, known[1:], strict=False))


_ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>", "gemma": "<end_of_turn>", "command-r": "<|END_OF_TURN_TOKEN|>"}


@pytest.mark.parametrize("name", _ENDS)
@given(contents=st.lists(_text, min_size=2, max_size=6).filter(lambda c: all(x.strip() for x in c)))
@settings(max_examples=60, deadline=None)
def test_trained_characters_are_the_answers_and_their_ends(name: str, contents: list[str], pairs: dict) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    answers = [text.strip() if STYLES[name].trims else text for text in contents[1::2]]
    assert spans(pairs[name][0], messages) == [answer + _ENDS[name] for answer in answers]


@pytest.mark.parametrize("name", ["chatml", "llama3", "zephyr", "mistral"])
@given(contents=st.lists(_text, min_size=2, max_size=4), cut=st.data())
@settings(max_examples=40, deadline=None)
def test_a_token_is_trained_when_it_stands_for_a_trained_character(
    name: str, contents: list[str], cut: st.DataObject, pairs: dict
) -> None:
    from surogate.data.encode import mask_of

    ours = pairs[name][0]
    text = "".join(contents)
    edges = sorted(cut.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4)))
    encoding = ours.backend.encode(text, add_special_tokens=False)
    ranges = [(edges[0], edges[1]), (edges[2], edges[3])]
    mask = mask_of(encoding, ranges, text)
    for (start, end), trained in zip(encoding.offsets, mask, strict=True):
        if start < end:
            assert trained == any(a < b and start < b and a < end for a, b in ranges)


def test_one_turn_can_be_left_out_whole(pairs: dict) -> None:
    turns = [dict(turn) for turn in TURNS]
    turns[1]["train"] = False
    expected = STYLES["chatml"].expected.replace("⟦one<|im_end|>⟧", "one<|im_end|>", 1)
    assert shown(pairs["chatml"][0], {"messages": [SYSTEM, *turns]}) == expected


def test_strategies(pairs: dict) -> None:
    ours = pairs["chatml"][0]
    assert spans(ours, TURNS, "last_turn") == ["one<|im_end|>"]
    assert "".join(spans(ours, TURNS, "all")) == ours.render_chat(TURNS)
    assert spans(ours, [*TURNS, {"role": "assistant", "content": "two"}], "completion_only") == [
        "one<|im_end|>",
        "two<|im_end|>",
    ]
    hidden = [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]
    assert "".join(spans(ours, hidden, "all")) == ours.render_chat(TURNS).replace(
        "<|im_start|>assistant\none<|im_end|>\n", "", 1
    )


_ROLES = [
    ("chatml", ("user",), "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n⟦Say one<|im_end|>⟧\n"
     "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\n⟦Say one again<|im_end|>⟧\n"
     "<|im_start|>assistant\none<|im_end|>\n"),
    ("qwen2.5", ("system", "assistant"), "<|im_start|>system\n⟦Be kind.<|im_end|>⟧\n"
     "<|im_start|>user\nSay one<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
     "<|im_start|>user\nSay one again<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n"),
    ("llama3", ("system", "user"), "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n⟦Be kind.<|eot_id|>⟧"
     "<|start_header_id|>user<|end_header_id|>\n\n⟦Say one<|eot_id|>⟧"
     "<|start_header_id|>assistant<|end_header_id|>\n\none<|eot_id|>"
     "<|start_header_id|>user<|end_header_id|>\n\n⟦Say one again<|eot_id|>⟧"
     "<|start_header_id|>assistant<|end_header_id|>\n\none<|eot_id|>"),
    ("mistral", ("user",), "<s>[INST] ⟦Say one [/INST]⟧ one</s>[INST] ⟦Say one again [/INST]⟧ one</s>"),
    ("gemma", ("user", "assistant"), "<bos><start_of_turn>user\n⟦Say one<end_of_turn>⟧\n"
     "<start_of_turn>model\n⟦one<end_of_turn>⟧\n<start_of_turn>user\n⟦Say one again<end_of_turn>⟧\n"
     "<start_of_turn>model\n⟦one<end_of_turn>⟧\n"),
    ("command-r", ("system",), "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>⟦Be kind.<|END_OF_TURN_TOKEN|>⟧"
     "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Say one<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>one<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Say one again<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>one<|END_OF_TURN_TOKEN|>"),
]  # fmt: skip


def by_characters(tokenizer: Tokenizer, messages: list[dict], train_on: object, tools: list | None = None) -> str:
    """Return the rendering with the trained characters between ⟦ and ⟧."""
    rendering = tokenizer.render([{k: v for k, v in m.items() if k != "train"} for m in messages], tools)
    text = rendering.text
    for start, end in reversed(TurnFinder(tokenizer).targets(rendering, messages, tools, {}, train_on)):  # type: ignore
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


@pytest.mark.parametrize(("name", "roles", "expected"), _ROLES, ids=[name for name, _, _ in _ROLES])
def test_turns_of_chosen_roles(name: str, roles: tuple[str, ...], expected: str, pairs: dict) -> None:
    ours = pairs[name][0]
    messages = [SYSTEM, *TURNS] if STYLES[name].system else TURNS
    assert by_characters(ours, messages, frozenset(roles)) == expected
    result = encode(ours, {"messages": messages}, train_on=list(roles))
    trained = [part.split("⟧")[0] for part in expected.split("⟦")[1:]]
    runs = np.flatnonzero(np.diff(result.mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert [ours.decode(result.tokens[a:b]).strip() for a, b in runs] == [part.strip() for part in trained]


def test_turns_of_tools_and_a_turn_left_out(pairs: dict) -> None:
    """Two answers of tools share a turn in this layout; the second one ends it."""
    ours = pairs["qwen2.5"][0]
    messages = [
        {"role": "user", "content": "1+1? 2+2?"},
        {"role": "assistant", "content": "Asking."},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "2 and 4", "train": False},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "2 and 4"},
    ]
    assert by_characters(ours, messages, frozenset({"assistant", "tool"})) == (
        "<|im_start|>user\n1+1? 2+2?<|im_end|>\n<|im_start|>assistant\n⟦Asking.<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n⟦2\n</tool_response>⟧"
        "\n<tool_response>\n⟦4\n</tool_response><|im_end|>⟧\n"
        "<|im_start|>assistant\n2 and 4<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n⟦2 and 4<|im_end|>⟧\n"
    )
    result = encode(ours, {"messages": TURNS}, train_on=["tool"])
    assert "no turn of the tool; roles: user, assistant" in result.dropped["nothing to train on"].detail


def test_a_role_whose_content_changes_what_is_around_it_is_not_guessed(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content | length ~ m.role ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    assert "hides where" in next(iter(encode(ours, {"messages": TURNS}, train_on=["user"]).dropped))


def test_reasoning_that_the_template_removes_or_adds(pairs: dict) -> None:
    ours = pairs["qwen3"][0]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nfirst"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "second", "reasoning_content": "new"},
    ]
    assert spans(ours, turns) == ["first<|im_end|>", "<think>\nnew\n</think>\n\nsecond<|im_end|>"]
    # Asked not to think, the prompt itself holds the empty thought: then it is no target.
    assert spans(ours, TURNS, enable_thinking=False)[-1] == "one<|im_end|>"


def test_tools_and_calls_equal_transformers(pairs: dict) -> None:
    ours, theirs = pairs["qwen2.5"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": "<b>"}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    stored = [dict(message) for message in messages]
    stored[1]["tool_calls"] = [{"name": "add", "arguments": '{"a": 1, "é": "<b>"}'}]  # as many data sets store it
    result = encode(ours, {"messages": stored, "tools": [TOOL]})
    expected = theirs.apply_chat_template(messages, tools=[TOOL], tokenize=True, return_dict=True)["input_ids"]
    assert result.tokens.tolist() == expected
    parts = marked(ours, result.tokens, result.mask).split("⟦")[1:]
    assert [part.split("⟧")[0] for part in parts] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "é": "<b>"}}\n</tool_call><|im_end|>',
        "It is 2<|im_end|>",
    ]


def test_an_answer_that_goes_on_with_the_turn_of_its_call(tmp_path: Path) -> None:
    """Some layouts put a call, the tool's answer and what the model says about it into one turn."""
    template = (
        "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<tool>' + m.content + '</tool>' }}{% else %}{% if not ns.open %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% endif %}{{ m.content }}{% set ns.open = m.tool_calls is defined %}{% for c in m.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + '</call>' }}{% endfor %}{% if not ns.open %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not ns.open %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    assert by_characters(ours, messages, "assistant") == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦Let me see.<call>add</call>⟧"
        "<tool>2</tool>⟦It is 2<|im_end|>⟧\n"
    )


def test_an_answer_of_a_tool_that_is_put_out_with_the_call_is_not_trained(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% if m.tool_calls %}{{ '<call>' + m.tool_calls[0].function.name + '</call>' }}"
        "{% if not loop.last %}{{ '<answer>' + messages[loop.index].content + '</answer>' }}{% endif %}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    assert by_characters(ours, messages, "assistant") == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦Let me see.<call>add</call>⟧<answer>2</answer>"
        "<|im_end|>\n<|im_start|>assistant\n⟦It is 2<|im_end|>⟧\n"
    )


_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)


def test_generation_marks_equal_transformers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=_MARKED)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    result = encode(ours, {"messages": TURNS})
    expected = theirs.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert result.tokens.tolist() == expected["input_ids"]
    assert result.mask.tolist() == expected["assistant_masks"]
    assert spans(ours, [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]) == ["one<|im_end|>"]


def test_marks_that_leave_out_the_end_are_remarked_upon(tmp_path: Path) -> None:
    template = _MARKED.replace("{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}"
                               "{{ '<|im_end|>' }}")  # fmt: skip
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    result = encode(ours, {"messages": TURNS})
    assert "⟦one⟧<|im_end|>" in marked(ours, result.tokens, result.mask)
    assert any("end-of-turn" in note for note in result.notes)


def test_output_collected_in_a_macro_is_found_by_checked_beginnings(tmp_path: Path) -> None:
    template = (
        "{% macro turns() %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% endmacro %}{{ turns() }}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    assert ours.render(TURNS).regions == [None] * 4
    assert spans(ours, TURNS) == ["one<|im_end|>"] * 2


def test_turns_that_cannot_be_found_are_not_guessed(tmp_path: Path) -> None:
    template = (
        "{% macro turns() %}{% for m in messages %}{{ (messages | length) ~ m.role ~ m.content ~ '<|im_end|>' }}"
        "{% endfor %}{% endmacro %}{{ turns() }}"
    )
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(TurnsNotFound):
        spans(ours, TURNS)
    assert "hides where" in next(iter(encode(ours, {"messages": TURNS}).dropped))


def test_end_token_behind_the_loop_belongs_to_the_last_turn(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ eos_token }}"
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    assert spans(ours, TURNS)[-1] == "one\n<|im_end|>"


def test_template_without_generation_prompt_still_masks_the_head(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    ours = Tokenizer(write_tokenizer(tmp_path, template=template))
    assert spans(ours, TURNS) == ["one<|im_end|>"] * 2


def test_a_conversation_that_the_assistant_opens(pairs: dict) -> None:
    """The default system turn of the template is rendered with the first message, but is no part of the answer."""
    opened = [{"role": "assistant", "content": "Hello"}, *TURNS]
    for name, end in (("smollm2", "<|im_end|>"), ("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")):
        ours = pairs[name][0]
        assert spans(ours, opened) == ["Hello" + end, "one" + end, "one" + end]
        assert spans(ours, [SYSTEM, *opened]) == ["Hello" + end, "one" + end, "one" + end]
        twice = [TURNS[0], opened[0], opened[0]]
        assert spans(ours, twice) == ["Hello" + end] * 2


def test_tokens_behind_the_end_of_a_turn_are_not_trained(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s><s>' }}{% endfor %}"
    ours = Tokenizer(write_tokenizer(tmp_path, special=("<s>", "</s>"), eos="</s>", bos="<s>", template=template))
    assert spans(ours, TURNS) == ["one</s>"] * 2


def test_what_the_template_does_not_show_is_remarked_upon(pairs: dict) -> None:
    row = {"messages": TURNS, "tools": [TOOL]}
    assert any("rows have tools" in note for note in encode(pairs["chatml"][0], row).notes)
    assert not encode(pairs["qwen2.5"][0], row).notes


def test_end_of_turn_that_is_no_single_token(tmp_path: Path) -> None:
    ours = Tokenizer(write_tokenizer(tmp_path, special=("<|endoftext|>",), eos="<|endoftext|>"))
    ours.use_chat_template("chatml")
    assert spans(ours, TURNS) == ["one<|im_end|>"] * 2


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("alpaca", "one<|im_end|>"),
        ("chatml", "one<|im_end|>"),
        ("gemma", "one<end_of_turn>"),
        ("llama3", "one<|eot_id|>"),
        ("mistral", " one<|im_end|>"),
        ("vicuna", " one<|im_end|>"),
        ("zephyr", "one<|im_end|>"),
    ],
)
def test_named_templates(name: str, answer: str, tmp_path: Path) -> None:
    from surogate.data.named import named_templates

    assert name in named_templates()
    plain = Tokenizer(write_tokenizer(tmp_path / "plain"))
    plain.use_chat_template(name)
    assert spans(plain, [SYSTEM, *TURNS]) == [answer] * 2
    assert "Be kind." in plain.render_chat([SYSTEM, *TURNS])
    with_bos = Tokenizer(write_tokenizer(tmp_path / "bos", bos="<|endoftext|>", adds_bos=True))
    with_bos.use_chat_template(name)
    assert with_bos.render_chat(TURNS) == "<|endoftext|>" + plain.render_chat(TURNS)
    with_bos.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.apply_chat_template(TURNS, tokenize=False) == with_bos.render_chat(TURNS)


def test_regions_know_messages_in_nested_loops_and_slices() -> None:
    source = (
        "A{% for m in messages[1:] %}{% if m.role == 'user' %}<{{ m.content }}>"
        "{% for n in messages if n.role == 'system' %}({{ n.content }}){% endfor %}!{% else %}{{ m.content }}"
        "{% for call in m.calls or [] %}{{ call }}{% endfor %}.{% endif %}{% if loop.last %}Z{% endif %}{% endfor %}B"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a", "calls": ["x", "y"]}]  # fmt: skip
    rendering = ChatTemplate(source).render(messages, {})
    assert rendering.text == "A<u>(s)!axy.ZB"
    # What a loop over other messages puts out inside a message is theirs, so the user's own output is in two parts.
    assert rendering.regions == [(4, 7), None, (8, 13)]


def test_chat_dataclass_is_what_a_format_returns() -> None:
    example = get_format("instruction").convert({"instruction": "i", "input": "x", "output": "o"}, {})
    assert isinstance(example, Chat)
    assert [m["content"] for m in example.messages] == ["i\n\nx", "o"]
