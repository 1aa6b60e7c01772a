"""Words for themselves have the ids of the library, for each kind of tokenizer that is taken on; others are refused."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from surogate.data import words
from surogate.data.encode import mask_of
from surogate.data.words import WordEncoder, mask_between
from tests.data.samples import _byte_level

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(expression: str) -> Any:
    return pre_tokenizers.Split(Regex(expression), "isolated")


# How well-known tokenizers find words; each with a normalizer, or none.
KINDS: dict[str, tuple[Any, Any]] = {
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "smollm2": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), None),
    "digits together": (pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(False)]), None),
    "llama3": (pre_tokenizers.Sequence([_split(_LLAMA3), _BYTES]), None),
    "qwen2": (pre_tokenizers.Sequence([_split(_QWEN2), _BYTES]), normalizers.NFC()),
    "gpt-oss": (pre_tokenizers.Sequence([_split(_O200K), _BYTES]), None),
    "deepseek": (
        pre_tokenizers.Sequence([_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(_DEEPSEEK), _BYTES]), None,
    ),
}  # fmt: skip
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def backend(kind: str) -> Tokenizer:
    """A small vocabulary with merges across all that words are made of, so that a wrong cut changes ids."""
    made = Tokenizer.from_str(_byte_level(_SPECIAL, 420))
    made.pre_tokenizer, made.normalizer = KINDS[kind]
    made.post_processor = None
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<tool>er", normalized=False)])
    return made


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Tokenizer, WordEncoder]]:
    found = {}
    for kind in KINDS:
        library = backend(kind)
        own = WordEncoder.of(library)
        assert own is not None
        own._unchecked = 0  # here the library is asked by the test
        found[kind] = (library, own)
    return found


_PIECES = st.sampled_from(
    ["the", "The", " fox", "'s", "'S", "'ſ", "'LL", "don't", " 1", "23", "4567", "½", "٣", " ", "  ", "\t", "\n",
     "\r\n", "漢字", "ひら",
     "\n\n", "\x0b", "\x85", "\xa0", "　", "…", "!?", " (", "/", "//\n", "é", "e\u0301", "\u0301", "ß", "İ", "K",
     "カナ", "한국", "😀", "👩‍👧", "\U0001f9ff", "\u0378", "ǅ", "ʰ", "_", "<", "<tool", "<tool>", "<tool>e", "<tool>er",
     "<|im_end|>", "<|im_", "|>", "\x00", "\x1c", "\ufeff", "\u200b", "ﬁ"]
)  # fmt: skip
_TEXT = st.lists(_PIECES | st.characters(codec="utf-8"), max_size=20).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=_TEXT)
@example(text="")
@example(text="a  \n 1 's  b\n\n\n<|im_end|>  ")
@settings(deadline=None, max_examples=250)
def test_ids_are_those_of_the_library(kind: str, text: str, pairs: dict) -> None:
    library, own = pairs[kind]
    ids = own.encode(text)
    if ids is None:  # only what is out of the ordinary is left to the library
        assert "ſ" in text or not unicodedata.is_normalized("NFC", text) or any(_rare(c) for c in text)
    else:
        assert ids.dtype == np.int32 and ids.tolist() == library.encode(text, add_special_tokens=False).ids


def _rare(character: str) -> bool:
    return unicodedata.category(character) in ("Cn", "Co", "Cs")


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_of_the_class_that_the_library_gives_it(kind: str, pairs: dict) -> None:
    """Each between letters, digits, spaces and signs; fifty a text."""
    library, own = pairs[kind]
    characters = [chr(code) for code in [*range(0x80, 0xD800), *range(0xE000, 0x20000)]]
    characters = [c for c in characters if unicodedata.category(c) != "Cn"][:: 1 if kind == "llama3" else 7]
    around = "a{0}a 1{0}2 {0}{0} .{0}!\n{0}\n'{0} "
    texts = ["".join(around.format(c) for c in characters[i : i + 50]) for i in range(0, len(characters), 50)]
    taken = 0
    for text, encoding in zip(texts, library.encode_batch(texts, add_special_tokens=False), strict=True):
        ids = own.encode(text)
        taken += ids is not None
        assert ids is None or ids.tolist() == encoding.ids
    assert taken > 0.7 * len(texts)


@pytest.mark.parametrize("kind", KINDS)
@given(text=_TEXT, data=st.data())
@settings(deadline=None, max_examples=100)
def test_masks_are_those_of_the_ranges_of_tokens(kind: str, text: str, data: st.DataObject, pairs: dict) -> None:
    library, own = pairs[kind]
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4)))
    spans = [(a, b) for a, b in (edges[:2], edges[2:]) if a < b]
    found = own.encode_with_places(text, [place for span in spans for place in span])
    if found is not None:
        ids, places = found
        encoding = library.encode(text, add_special_tokens=False)
        assert mask_between(places, spans, len(ids)).tolist() == mask_of(encoding, spans, text).tolist()


def test_places_inside_words_and_tokens(pairs: dict) -> None:
    library, own = pairs["llama3"]
    text = "the fox<|im_start|>assistant\n  Hello 漢字 the lazy dog<|im_end|>"
    offsets = library.encode(text, add_special_tokens=False).offsets
    special = [range(text.index(token) + 1, text.index(token) + len(token)) for token in _SPECIAL[1:]]
    for place in range(len(text) + 1):
        found = own.encode_with_places(text, [place])
        if any(place in inside for inside in special):
            assert found is None
        else:
            assert found is not None
            ended, begun = sum(end <= place for _, end in offsets), sum(start < place for start, _ in offsets)
            assert found[1] == {place: (ended, begun)}, place


def test_words_are_forgotten_when_they_become_too_many(pairs: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    library = backend("gpt2")
    own = WordEncoder.of(library)
    assert own is not None
    monkeypatch.setattr(words, "_MOST_WORDS", 20)
    text = " ".join(f"word{chr(97 + i % 26) * (i % 5)}" for i in range(200)) + " " + "x" * 1000
    assert own.encode(text).tolist() == library.encode(text).ids  # type: ignore[union-attr]
    assert len(own._words) <= 20 and not any(len(word) > 64 for word in own._words)


def test_a_difference_in_the_first_texts_leaves_all_to_the_library() -> None:
    own = WordEncoder.of(backend("gpt2"))
    assert own is not None and own.encode("the fox") is not None
    own._words["fox"] = own._words[" fox"] = b""
    assert own.encode("a fox") is None and own.encode("dog") is None


def _other(change: str) -> Tokenizer:
    made = backend("gpt2")
    if change == "prefix space":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    elif change == "no pre-tokenizer":
        made.pre_tokenizer = None
    elif change == "words without bytes":
        made.pre_tokenizer = _split(_QWEN2)
    elif change == "split that removes":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("a"), "removed"), _BYTES])
    elif change == "look behind":
        made.pre_tokenizer = pre_tokenizers.Sequence([_split(r"(?<=a)b|\s+|\S+"), _BYTES])
    elif change == "word boundary":
        made.pre_tokenizer = pre_tokenizers.Sequence([_split(r"\b\w+|."), _BYTES])
    elif change == "lower case":
        made.normalizer = normalizers.Lowercase()
    elif change == "token that takes spaces":
        made.add_tokens([AddedToken("<rest>", rstrip=True)])
    elif change == "dropout":
        made.model.dropout = 0.1
    elif change == "another model":
        made = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.parametrize(
    "change",
    ["prefix space", "metaspace", "no pre-tokenizer", "words without bytes", "split that removes", "look behind",
     "word boundary", "lower case", "token that takes spaces", "dropout", "another model"],
)  # fmt: skip
def test_other_tokenizers_are_left_to_the_library(change: str) -> None:
    assert WordEncoder.of(_other(change)) is None


def test_what_no_expression_matches_is_a_word_too() -> None:
    made = backend("gpt2")
    made.pre_tokenizer = pre_tokenizers.Sequence([_split(r"[a-z]+| "), _BYTES])
    own = WordEncoder.of(made)
    assert own is not None
    for text in ("the fox", "The foX, AN fox!"):
        assert own.encode(text).tolist() == made.encode(text).ids  # type: ignore[union-attr]
