"""Small tokenizers and chat templates. The templates are worded by us after the layouts that well-known models use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_PROSE = (
    "The quick brown fox jumps over the lazy dog. Say hello to the world, and answer what was asked: one, two, three!\n"
    "system user assistant tool model content role instruction response question\n\n  indented text 0123456789 "
    "def add(a, b):\n    return a + b\n"
) * 4


@cache
def _byte_level(special: tuple[str, ...], size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator([_PROSE], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-2's: offsets without spaces
    return tokenizer.to_str()


@cache
def _sentencepiece_like(special: tuple[str, ...]) -> str:
    """BPE over text whose spaces are ``▁``, with byte fallback: the layout of Llama 2 and Mistral."""
    words = sorted({"▁" + word for word in _PROSE.split()} | {word for word in _PROSE.split()})
    characters = sorted(set("".join(words)) | {"\n"})
    vocabulary = {token: index for index, token in enumerate(["<unk>", *special])}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + characters:
        vocabulary.setdefault(token, len(vocabulary))
    merges = []
    for word in words:
        for end in range(2, min(len(word), 5) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *special])
    return tokenizer.to_str()


def write_tokenizer(
    directory: Path,
    *,
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos: str = "<|im_end|>",
    bos: str | None = None,
    adds_bos: bool = False,
    template: str | None = None,
    sentencepiece: bool = False,
    size: int = 420,
) -> Path:
    """Write the files of a tokenizer; return the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_sentencepiece_like(special) if sentencepiece else _byte_level(special, size))
    if adds_bos:
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if bos is not None:
        config["bos_token"] = bos
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def chat(*turns: str) -> dict[str, Any]:
    """Make a row of turns written as ``"user: text"``."""
    return {"messages": [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]}


@dataclass(frozen=True)
class Style:
    """A model family's way to lay out conversations.

    Attributes:
        template: Jinja.
        expected: the sample conversation as it must be rendered, what is trained between ``⟦`` and ``⟧``.
        special: special tokens.
        bos: token at the beginning, ``None`` if there is none.
        eos: token at the end.
        system: the template takes a system turn.
        sentencepiece: kind of tokenizer.
    """

    template: str
    expected: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    system: bool = True
    sentencepiece: bool = False
    trims: bool = field(default=False)

    def write(self, directory: Path) -> Path:
        return write_tokenizer(
            directory, special=self.special, eos=self.eos, bos=self.bos, adds_bos=self.adds_bos,
            template=self.template, sentencepiece=self.sentencepiece,
        )  # fmt: skip


SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [
    {"role": "user", "content": "Say one"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "Say one again"},
    {"role": "assistant", "content": "one"},
]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHATML_EXPECTED = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSay one<|im_end|>\n"
    "<|im_start|>assistant\n⟦one<|im_end|>⟧\n<|im_start|>user\nSay one again<|im_end|>\n"
    "<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
)
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

STYLES = {
    "chatml": Style(_CHATML, _CHATML_EXPECTED, _CHATML_TOKENS, "<|im_end|>"),
    "smollm2": Style(
        "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        _CHATML_EXPECTED, _CHATML_TOKENS, "<|im_end|>", "<|im_start|>",
    ),
    "qwen2.5": Style(
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}"
        "{%- endif %}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif messages[0].role == 'system' %}"
        "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}"
        "{%- if message.role == 'tool' %}"
        "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- else %}{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\\n' + message.content }}"
        "{%- endif %}{%- for call in message.tool_calls or [] %}"
        "{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        _CHATML_EXPECTED, _CHATML_TOKENS, "<|im_end|>",
    ),
    "qwen3": Style(
        "{%- set ns = namespace(last=0) %}{%- for message in messages[::-1] %}"
        "{%- if message.role == 'user' and not ns.last %}{%- set ns.last = messages|length - loop.index0 - 1 %}"
        "{%- endif %}{%- endfor %}{%- for message in messages %}{%- if message.role == 'assistant' %}"
        "{%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}"
        "{%- set said = message.content %}{%- if '</think>' in said %}"
        "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last %}"
        "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- said + '<|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- endif %}{%- endif %}",
        _CHATML_EXPECTED.replace("⟦one<|im_end|>⟧\n", "⟦<think>\n\n</think>\n\none<|im_end|>⟧\n").replace(
            "⟦<think>\n\n</think>\n\none<|im_end|>⟧\n<|im_start|>user", "⟦one<|im_end|>⟧\n<|im_start|>user"
        ),
        _CHATML_TOKENS, "<|im_end|>",
    ),
    "llama3": Style(
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
        "{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nSay one<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦one<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nSay one again<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦one<|eot_id|>⟧",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>",
        "<|begin_of_text|>", True, trims=True,
    ),
    "mistral": Style(
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}",
        "<s>[INST] Say one [/INST]⟦ one</s>⟧[INST] Say one again [/INST]⟦ one</s>⟧",
        ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", True, False, True,
    ),
    "gemma": Style(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        "<bos><start_of_turn>user\nSay one<end_of_turn>\n<start_of_turn>model\n⟦one<end_of_turn>⟧\n"
        "<start_of_turn>user\nSay one again<end_of_turn>\n<start_of_turn>model\n⟦one<end_of_turn>⟧\n",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", True, False, trims=True,
    ),
    "phi": Style(
        "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|system|>\nBe kind.<|end|>\n<|user|>\nSay one<|end|>\n<|assistant|>\n⟦one<|end|>⟧\n"
        "<|user|>\nSay one again<|end|>\n<|assistant|>\n⟦one<|end|>⟧\n<|endoftext|>",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>",
    ),
    "deepseek": Style(
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
        "{%- elif message['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}"
        "{%- endfor -%}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Say one<｜Assistant｜>⟦one<｜end▁of▁sentence｜>⟧"
        "<｜User｜>Say one again<｜Assistant｜>⟦one<｜end▁of▁sentence｜>⟧",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"), "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>", True,
    ),
    "zephyr": Style(
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        "<|system|>\nBe kind.</s>\n<|user|>\nSay one</s>\n<|assistant|>\n⟦one</s>⟧\n"
        "<|user|>\nSay one again</s>\n<|assistant|>\n⟦one</s>⟧\n",
        ("<s>", "</s>"), "</s>", "<s>", True, sentencepiece=True,
    ),
    "command-r": Style(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
        "{% set system_message = false %}{% endif %}{% if system_message != false %}"
        "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
        "{% for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}"
        "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be kind.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Say one<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦one<|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Say one again<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦one<|END_OF_TURN_TOKEN|>⟧",
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
         "<|SYSTEM_TOKEN|>"), "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", True, trims=True,
    ),
}  # fmt: skip
"""Eleven layouts, each with what is trained in the sample conversation, written down by hand."""

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add <two> numbers", "parameters": {"type": "object", "properties": {}}},
}


def marked(tokenizer: Any, ids: Any, mask: Any) -> str:
    """Return the row's text with each run of trained tokens between ``⟦`` and ``⟧``."""
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = tokenizer.decode(ids[start:end])
            parts.append(f"⟦{text}⟧" if mask[start] else text)
            start = end
    return "".join(parts)
