"""The tokenizer in a GGUF file, as the files that the Hugging Face ecosystem loads.

Two kinds of tokenizer are known: ``gpt2``, byte-level BPE behind one of the pre-tokenisers that llama.cpp names, and
``llama``, SentencePiece BPE with byte fallback, of which the file keeps pieces and scores but no merges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate.errors import UserError
from surogate.io.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The regular expressions by which the models of each family split text before BPE.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEX = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
_PRETOKENIZERS = ("default", "gpt-2", "smollm", *_REGEX)
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word that is in the vocabulary is a token, whatever the merges say

# Types of tokens in GGUF
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


def write_tokenizer_files(file: GGUFFile, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) to an existing directory.

    Raises:
        UserError: the file has no tokenizer, or one of an unknown kind.
    """
    build_tokenizer(file).save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(file), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Derive the content of ``tokenizer_config.json``: special tokens by name, chat template, length."""
    meta = file.metadata
    tokens = _tokens(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    length = meta.get(f"{meta.get('general.architecture')}.context_length")
    if length is not None:
        config["model_max_length"] = int(length)
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = _token_id(file, theirs)
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer from a file's metadata. Token ids are the file's.

    Raises:
        UserError: the file has no tokenizer, or one of an unknown kind.
    """
    from tokenizers import AddedToken

    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(file)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(file)
    else:
        raise UserError(
            f"a tokenizer of kind {kind!r}" if kind else "the file has no tokenizer",
            where=str(file.path),
            expected="gpt2 (byte-level BPE) or llama (SentencePiece BPE)",
            fix="use the model's Hugging Face directory",
        )
    tokens = _tokens(file)
    special = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, _types(file), strict=True)
            if kind in special
        ]
    )
    _add_post_processor(file, tokenizer, tokens)
    return tokenizer


def _byte_level_bpe(file: GGUFFile) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    variant = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if variant not in _PRETOKENIZERS:
        raise UserError(
            f"a pre-tokeniser named {variant!r}",
            where=str(file.path),
            expected=f"one of {', '.join(_PRETOKENIZERS)}",
            fix="use the model's Hugging Face directory",
        )
    tokens = _tokens(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=variant in _WHOLE_WORDS_FIRST,
        )
    )
    if variant in _REGEX:
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(_REGEX[variant]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if variant == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if _REGEX.get(variant) is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: GGUFFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = _tokens(file), file.metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise UserError("a SentencePiece tokenizer without scores", where=str(file.path), fix="use another file")
    unknown = _token_id(file, "unknown")
    unk_token = tokens[unknown] if unknown is not None else None
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, _types(file)),
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=_BYTE in _types(file),
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Reconstruct the merges of a SentencePiece BPE model.

    SentencePiece merges, of all neighbouring pieces, the pair whose union has the highest score. So every way to split
    a piece into two pieces is a merge, and merges rank by the score of what they make; among the splits of one piece,
    which never compete for the same text in training, the order of the parts' ids decides.
    """
    plain = {token: index for index, token in enumerate(tokens) if types[index] not in (_CONTROL, _UNKNOWN, _BYTE)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in plain.items():
        for cut in range(1, len(token)):
            left, right = plain.get(token[:cut]), plain.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token[:cut], token[cut:]))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_post_processor(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Put BOS before and EOS after every text where the file (or llama.cpp's default for its kind) says so."""
    from tokenizers import processors

    meta = file.metadata
    by_default = meta.get("tokenizer.ggml.model") == "llama" or meta.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = _token_id(file, "bos") if meta.get("tokenizer.ggml.add_bos_token", by_default) else None
    eos = _token_id(file, "eos") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        if meta.get("tokenizer.ggml.model") == "gpt2":
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    special = [(tokens[index], index) for index in (bos, eos) if index is not None]
    before = [tokens[bos]] if bos is not None else []
    after = [tokens[eos]] if eos is not None else []
    first = [*before, "$A", *after]
    second = [f"{part}:1" for part in (*before, "$B", *after)]
    tokenizer.post_processor = processors.TemplateProcessing(single=first, pair=first + second, special_tokens=special)


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UserError("the file has no tokenizer", where=str(file.path), fix="use the model's Hugging Face directory")
    return list(tokens)


def _types(file: GGUFFile) -> list[int]:
    tokens = _tokens(file)
    types = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{len(tokens)} tokens but {len(types)} token types", where=str(file.path))
    return list(types)


def _token_id(file: GGUFFile, name: str) -> int | None:
    index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return int(index) if index is not None and 0 <= int(index) < len(_tokens(file)) else None
