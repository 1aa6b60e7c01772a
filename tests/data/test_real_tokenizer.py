"""A real model's tokenizer and template: ids of transformers, masks by hand, and masks equal to generation marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from surogate.data import DataOptions, Tokenizer
from surogate.data.chunks import Rows
from surogate.data.encode import RowEncoder
from surogate.data.formats import get_format
from tests.data.samples import SYSTEM, TURNS, marked

CONVERSATIONS = [
    [SYSTEM, *TURNS],
    TURNS,
    [
        {"role": "user", "content": "  naïve 漢字 😀 <|im_end|>?\n"},
        {"role": "assistant", "content": "def f(x):\n    return x  # 1234\n"},
    ],
    [{"role": "assistant", "content": "Hello"}, *TURNS],
]
# The template that ships with the model, with generation marks around what an assistant's turn is trained on.
MARKED = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
)


def encoded(tokenizer: Tokenizer, messages: list[dict]):
    rows = Rows(0, "rows", 1, 0, [(1, {"messages": messages})])
    return RowEncoder(tokenizer, DataOptions([], Path())).encode(rows, get_format("conversation"), {})


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_smollm2(messages: list[dict], smollm2: Path) -> None:
    ours, theirs = Tokenizer(smollm2), AutoTokenizer.from_pretrained(smollm2)
    result = encoded(ours, messages)
    assert result.tokens.tolist() == theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    marks = theirs.apply_chat_template(
        messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert result.tokens.tolist() == marks["input_ids"]
    assert result.mask.tolist() == marks["assistant_masks"]


def test_smollm2_by_hand(smollm2: Path) -> None:
    ours = Tokenizer(smollm2)
    result = encoded(ours, [SYSTEM, *TURNS])
    assert marked(ours, result.tokens, result.mask) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSay one<|im_end|>\n"
        "<|im_start|>assistant\n⟦one<|im_end|>⟧\n<|im_start|>user\nSay one again<|im_end|>\n"
        "<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
    )
