"""Tokenizers rebuilt from GGUF against the classes of transformers, and SentencePiece BPE against its definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate.errors import UserError
from surogate.io.gguf_file import GGUFFile
from surogate.io.gguf_tokenizer import build_tokenizer, tokenizer_config, write_tokenizer_files

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CORPUS = [
    "The quick brown fox doesn't jump over 13 lazy dogs; it's 2024, and they'll see 1,234,567 foxes.",
    "  indented\n\n\n    lines\twith tabs  \r\nand CRLF   ",
    "Déjà vu — naïve café, ΑΒΓ αβγ, 日本語の文章, русский текст, 🙂🙃 e\u0301",
    "def f(x):\n    return x ** 2 + 10  # comment\n",
] * 3
TEXTS = [*CORPUS[:4], "", " ", "a", "  12 345 6789\n\n 0. x", "unseen \u4e2d\u6587 \U0001f9ff", "HELLO'S I'LL"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(pretokenizer: Any) -> tuple[list[str], list[str]]:
    """Train a tiny byte-level BPE; return tokens by id and merges."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = pretokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary = trained.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges


def write_tokenizer(path: Path, tokens: list[str], **metadata: Any) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(tokens)
    for key, value in metadata.items():
        key = "tokenizer." + key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def gpt2_file(path: Path, pre: str, tokens: list[str], merges: list[str], **more: Any) -> GGUFFile:
    types = [3 if token in SPECIAL else 1 for token in tokens]
    return write_tokenizer(
        path, tokens, ggml__model="gpt2", ggml__pre=pre, ggml__merges=merges, ggml__token_type=types,
        ggml__eos_token_id=0, ggml__padding_token_id=0, **more,
    )  # fmt: skip


def reference(pre: str, tokens: list[str], merges: list[str]) -> Any:
    """The tokenizer that transformers builds for the family of this pre-tokeniser."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(m.split(" ")) for m in merges]
    if pre == "qwen2":
        return transformers.Qwen2Tokenizer(vocab=vocabulary, merges=pairs)
    if pre == "gpt-2":
        return transformers.GPT2Tokenizer(vocab=vocabulary, merges=pairs)
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = TikTokenConverter("unused").pattern  # Llama 3's
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, ignore_merges=True))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated", False)
    byte = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte])
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "llama-bpe"])
def test_ids_are_those_of_the_family(pre: str, tmp_path: Path) -> None:
    tokens, merges = byte_level(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    oracle = reference(pre, tokens, merges)
    file = gpt2_file(tmp_path / "x.gguf", pre, tokens, merges)
    ours = build_tokenizer(file)
    for text in TEXTS:
        assert ours.encode(text).ids == oracle(text, add_special_tokens=False).input_ids, text
        assert ours.decode(ours.encode(text).ids) == oracle.decode(oracle(text).input_ids), text


def test_smollm_splits_digits_one_by_one(tmp_path: Path) -> None:
    tokens, merges = byte_level(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    ours = build_tokenizer(gpt2_file(tmp_path / "x.gguf", "smollm", tokens, merges))
    words = [ours.id_to_token(i) for i in ours.encode("In 2024,\n\n  17 foxes").ids]
    assert [w for w in words if any(c.isdigit() for c in w)] == list("202417")
    for text in TEXTS:
        assert ours.decode(ours.encode(text).ids) == text


def test_special_tokens_and_template_reach_transformers(tmp_path: Path) -> None:
    tokens, merges = byte_level(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    file = gpt2_file(tmp_path / "x.gguf", "qwen2", tokens, merges, chat_template=template)
    write_tokenizer_files(file, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token == loaded.pad_token == "<|endoftext|>" and loaded.model_max_length == 128
    text = loaded.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n"
    ids = loaded(text).input_ids
    assert ids[0] == tokens.index("<|im_start|>") and tokens.index("<|im_end|>") in ids
    assert loaded.decode(ids, skip_special_tokens=True) == "user\na\n"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_bos_is_added_where_the_family_has_it(pre: str, tmp_path: Path) -> None:
    tokens, merges = byte_level(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    file = gpt2_file(tmp_path / "x.gguf", pre, tokens, merges, ggml__bos_token_id=1)
    assert (build_tokenizer(file).encode("a").ids[0] == 1) is (pre == "llama-bpe")
    file = gpt2_file(
        tmp_path / "y.gguf", pre, tokens, merges, ggml__bos_token_id=1, ggml__add_bos_token=pre == "qwen2",
        ggml__add_eos_token=True,
    )  # fmt: skip
    ids = build_tokenizer(file).encode("a").ids
    assert (ids[0] == 1) is (pre == "qwen2") and ids[-1] == 0


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def sentencepiece() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types as SentencePiece's BPE trainer makes them: score -rank, bytes for what is unknown."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    single = [p for p in pieces if len(p) == 1 and (p.isascii() or p == "▁")]
    merged = [p for p in pieces if len(p) > 1 and set(p) <= set(single)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *merged, *single]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(single))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(single))]
    return tokens, scores, types


def by_definition(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece BPE, word for word: merge the neighbours whose union scores highest, leftmost first."""
    index = {token: i for i, token in enumerate(tokens) if i >= 259}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = enumerate(zip(parts, parts[1:], strict=False))
        unions = [(scores[index[a + b]], -i) for i, (a, b) in pairs if a + b in index]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for p in parts for i in ([index[p]] if p in index else [3 + b for b in p.encode()])]


def spm_file(path: Path, **more: Any) -> GGUFFile:
    tokens, scores, types = sentencepiece()
    return write_tokenizer(
        path, tokens, ggml__model="llama", ggml__scores=scores, ggml__token_type=types, ggml__bos_token_id=1,
        ggml__eos_token_id=2, ggml__unknown_token_id=0, **more,
    )  # fmt: skip


def test_sentencepiece_ids_are_those_of_the_definition(tmp_path: Path) -> None:
    file = spm_file(tmp_path / "x.gguf")
    ours, (tokens, scores, _) = build_tokenizer(file), sentencepiece()
    for text in TEXTS:
        if text:
            ids = ours.encode(text).ids
            assert ids == [1, *by_definition(text, tokens, scores)], text  # BOS is llama.cpp's default for this kind
            assert ours.decode(ids, skip_special_tokens=True) == text
    assert tokenizer_config(file)["unk_token"] == "<unk>" and tokenizer_config(file)["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml__model": "gpt2", "ggml__pre": "dbrx"}, "pre-tokeniser named 'dbrx'"),
        ({"ggml__model": "bert"}, "kind 'bert'"),
        ({}, "no tokenizer"),
        ({"ggml__model": "llama"}, "without scores"),
        ({"ggml__model": "gpt2", "ggml__token_type": [1]}, "2 tokens but 1 token types"),
    ],
)
def test_what_is_not_known_is_said(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        build_tokenizer(write_tokenizer(tmp_path / "x.gguf", ["a", "b"], **metadata))
