"""Byte-level BPE word by word: the ids of the ``tokenizers`` library, several times faster.

Such a tokenizer cuts a text at its added tokens, then into words by regular expressions, and encodes every word for
itself. Most words of a text are the same few, so here every distinct word is encoded once, by the library's model, and
looked up ever after. The library does that too, but keeps track of each character's place on the way, which takes most
of its time.

Words are found by Python's ``re`` with the tokenizer's own expressions. ``re`` knows no ``\\p{L}``, and its tables of
Unicode are not the library's, so both are taken from the library: for every character its regular expressions are asked
to which of the classes it belongs that the expressions name, and in the text that ``re`` sees a character beyond ASCII
is replaced by one that stands for its classes. Whatever is out of the ordinary, in the tokenizer or in a text, is left
to the library.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

Span = tuple[int, int]
Places = dict[int, tuple[int, int]]

_MOST_WORDS = 1 << 17
_LONG_WORD = 64  # characters; longer ones hardly come again
_SHORT, _MOST_REPEATED = 256, 4096  # characters; texts
_CHECKED = 16
"""Texts at the beginning that the library encodes as well; should one differ, it goes on alone."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own expression
_DIGIT = "digit"  # the class that the pre-tokenizer Digits splits at; not \d
_STRANGE = 0xFF  # stands for characters that are out of the ordinary

# One item of a regular expression, as far as they are understood here.
_ITEM = re.compile(r"\\[pP]\{[A-Za-z]+\}|\\[sSdD]|\\[rnt]|\\[^\w\s]|\(\?(?:i?:|!|=)|\{\d*,?\d*\}|[ -~]", re.ASCII)
_CLASS = re.compile(r"\\[pP]\{[A-Za-z]+\}|\\[sSdD]")
_BRACKET = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)


class _Unknown(Exception):
    """The tokenizer, or an expression of it, is of no kind that is known here."""


class WordEncoder:
    """Encodes texts word by word.

    Use :meth:`of`, which knows for which tokenizers this is right.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        from tokenizers import models

        if not isinstance(backend.model, models.BPE) or backend.model.dropout:
            raise _Unknown
        self._backend = backend
        self._normalizes = _normalizes(backend)
        decoder = backend.get_added_tokens_decoder()
        self._added = {token.content: array("i", [index]).tobytes() for index, token in decoder.items()}
        self._cut = _cut_at(backend)
        self._classes = _Classes()
        *splits, words = [self._classes.translate(step) for step in _steps(backend)]
        self._classes.finish()
        self._splits: list[Callable[[str], list[str]]] = []
        for pattern in splits:
            self._splits.append(_compile(f"({self._classes.fill(pattern)})", groups=1).split)
        self._find = self._finder(self._classes.fill(words))
        self._words = _Words(backend.model)
        self._repeated: dict[str, bytes] = {}  # short texts between added tokens: line breaks, roles, system prompts
        self._unchecked = _CHECKED

    def _finder(self, expression: str) -> Callable[[str], list[str]]:
        """Return what cuts a text into words; what the expression does not match is a word too."""
        pattern = _compile(expression, groups=0)
        if all(pattern.fullmatch(character) for character in self._classes.alphabet()):
            return pattern.findall
        split = _compile(f"({expression})", groups=1).split
        return lambda text: [word for word in split(text) if word]

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> WordEncoder | None:
        """Return an encoder for this tokenizer, ``None`` where only the library will do.

        Args:
            backend: without post-processor, truncation and padding.
        """
        try:
            return cls(backend)
        except _Unknown:
            return None

    def encode(self, text: str) -> np.ndarray | None:
        """Return int32 ids of a text, ``None`` where only the library can tell them."""
        found = self.encode_with_places(text, ())
        return None if found is None else found[0]

    def encode_with_places(self, text: str, places: Iterable[int]) -> tuple[np.ndarray, Places] | None:
        """Encode, and find the tokens at some places.

        Args:
            text: any text.
            places: between characters, from 0 to the length of the text.

        Returns:
            int32 ids; and for each place the number of tokens that end at it or before, and of those that begin before
            it, which is one more where the place is inside a token. ``None`` for a text that only the library can
            encode, and where a place is inside an added token.
        """
        if self._unchecked < 0 or (self._normalizes and not text.isascii() and self._changes(text)):
            return None
        wanted = sorted(set(places), reverse=True)
        found: Places = {}
        parts: list[bytes] = []
        at = count = 0  # characters, tokens
        for number, part in enumerate(self._cut(text)):
            end = at + len(part)
            if wanted and wanted[-1] == at:
                found[wanted.pop()] = (count, count)
            if number % 2:
                ids: bytes | None = self._added[part]
            elif not wanted or wanted[-1] >= end:
                ids = self._ids_between(part)
            else:
                words = self._words_of(part)
                if words is None:
                    return None
                while wanted and wanted[-1] < end:
                    place = wanted.pop()
                    first, last = self._tokens_before(words, place - at)
                    found[place] = (count + first, count + last)
                ids = b"".join(map(self._words.__getitem__, words))
            if ids is None or (wanted and wanted[-1] < end):
                return None
            parts.append(ids)
            count += len(ids) // 4
            at = end
        found.update(dict.fromkeys(wanted, (count, count)))
        all_ids = np.frombuffer(bytearray().join(parts), np.int32)
        if self._unchecked and not self._right(text, all_ids):
            return None
        return all_ids, found

    def _ids_between(self, part: str) -> bytes | None:
        """Return the ids of a text between added tokens."""
        ids = self._repeated.get(part)
        if ids is None:
            words = self._words_of(part)
            if words is None:
                return None
            ids = b"".join(map(self._words.__getitem__, words))
            if len(part) <= _SHORT:
                if len(self._repeated) >= _MOST_REPEATED:
                    self._repeated.clear()
                self._repeated[part] = ids
        return ids

    def _tokens_before(self, words: Sequence[str], place: int) -> tuple[int, int]:
        """Return the number of tokens of ``words`` that end at a place or before, and that begin before it."""
        lookup = self._words.__getitem__
        count = at = 0
        for word in words:  # nearly always one of the first: the beginning of an answer
            if at >= place:
                break
            ids = lookup(word)
            if at + len(word) > place:
                # The tokens of a word are runs of its bytes, one for each character that the vocabulary writes.
                own = np.cumsum([len(self._backend.id_to_token(i) or "") for i in array("i", ids)])
                inside = len(word[: place - at].encode())
                first = count + int(np.searchsorted(own, inside, side="right"))
                return first, count + int(np.searchsorted(own, inside, side="left")) + 1
            count += len(ids) // 4
            at += len(word)
        return count, count

    def _right(self, text: str, ids: np.ndarray) -> bool:
        self._unchecked -= 1
        if self._backend.encode(text, add_special_tokens=False).ids == ids.tolist():
            return True
        self._unchecked = -1
        return False

    def _changes(self, text: str) -> bool:
        changed: bool = self._backend.normalizer.normalize_str(text) != text
        return changed

    def _words_of(self, text: str) -> list[str] | None:
        """Cut into words; ``None`` where not every character belongs to one."""
        shown = text if text.isascii() else text.translate(self._classes.table)
        pieces = [shown]
        for split in self._splits:
            pieces = [part for piece in pieces for part in split(piece) if part]
        if len(pieces) <= 1:
            words = self._find(shown)
        else:
            find = self._find
            words = [word for piece in pieces for word in find(piece)]
        if sum(map(len, words)) != len(text):
            return None
        if shown is text:
            return words
        if chr(_STRANGE) in shown:
            return None
        at, own = 0, []
        for word in words:
            own.append(text[at : at + len(word)])
            at += len(word)
        return own


class _Words(dict[str, bytes]):
    """Words to their ids, int32 after int32. Encodes those that it does not know."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._tokenize = model.tokenize
        # Bytes to the characters that stand for them in byte-level vocabularies (Radford et al. 2019).
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._characters = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}

    def __missing__(self, word: str) -> bytes:
        characters = word.encode().decode("latin-1").translate(self._characters)
        ids = array("i", [token.id for token in self._tokenize(characters)]).tobytes()
        if len(word) <= _LONG_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the expressions by which the pre-tokenizer splits, one after the other; the last one finds words."""
    state = _state(backend.pre_tokenizer)
    parts = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    steps = []
    for part in parts:
        kind = part.get("type")
        if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"] and "Regex" in part["pattern"]:
            steps.append(part["pattern"]["Regex"])
        elif kind == "Digits":
            steps.append(f"{{{_DIGIT}}}" + ("" if part["individual_digits"] else "+"))
        elif kind == "ByteLevel" and part is parts[-1] and not part["add_prefix_space"]:
            steps += [_GPT2] if part.get("use_regex", True) else []
        else:
            raise _Unknown
    if not steps or parts[-1].get("type") != "ByteLevel":
        raise _Unknown
    return steps


def _normalizes(backend: tokenizers.Tokenizer) -> bool:
    if backend.normalizer is None:
        return False
    if _state(backend.normalizer).get("type") != "NFC":  # NFC leaves ASCII as it is
        raise _Unknown
    return True


def _state(part: Any) -> dict[str, Any]:
    if part is None:
        raise _Unknown
    state = json.loads(part.__getstate__())
    if not isinstance(state, dict):
        raise _Unknown
    return state


def _cut_at(backend: tokenizers.Tokenizer) -> Callable[[str], list[str]]:
    """Return what cuts a text at added tokens: parts at even places are text, those between are added tokens."""
    plain: list[str] = []
    normalized: list[str] = []
    for token in backend.get_added_tokens_decoder().values():
        if token.single_word or token.lstrip or token.rstrip or not token.content:
            raise _Unknown
        if token.normalized and backend.normalizer is not None and not token.content.isascii():
            raise _Unknown
        (normalized if token.normalized else plain).append(token.content)
    if plain and normalized:
        # The library looks for the first kind in all of the text, and for the second in what is left.
        if any(a in b or b in a or _overlap(a, b) or _overlap(b, a) for a in plain for b in normalized):
            raise _Unknown
    tokens = sorted([*plain, *normalized], key=len, reverse=True)  # of several at one place the longest
    if not tokens:
        return lambda text: [text]
    split = re.compile("(" + "|".join(map(re.escape, tokens)) + ")").split
    marks = "".join({token[0] for token in tokens})
    if len(marks) == 1:
        return lambda text: split(text) if marks in text else [text]
    return split


def _overlap(a: str, b: str) -> bool:
    return any(a.endswith(b[:length]) for length in range(1, min(len(a), len(b))))


class _Classes:
    """The classes of characters that expressions name, and what stands for a character in the text that ``re`` sees."""

    def __init__(self) -> None:
        self._tests: dict[str, Callable[[str], bool]] = {}
        self._without_case = ""  # expressions that match letters of either case
        self._stand_ins: dict[tuple[bool, ...], int] = {}
        self.table: dict[int, int] = _Table(self.stand_in)

    def translate(self, expression: str) -> str:
        """Return an expression of ``re`` in which classes are written ``\\0NAME\\0``; see :meth:`fill`.

        Raises:
            _Unknown: it has something that is not understood here.
        """
        if "(?i:" in expression:
            self._without_case += expression.lower()
        result, at, inside = [], 0, False
        while at < len(expression):
            if expression.startswith(f"{{{_DIGIT}}}", at):
                result.append(self._class(_DIGIT, False))
                at += len(_DIGIT) + 2
                continue
            bracket = None if inside else _BRACKET.match(expression, at)
            if bracket and not bracket[0].isascii():
                result.append(self._class(bracket[0], False))  # ranges beyond ASCII: one class as a whole
                at = bracket.end()
                continue
            match = _ITEM.match(expression, at)
            item = match[0] if match else ""
            # Sets within sets, and anchors and the like, of which none is about.
            if not match or item in ([r"["] if inside else [".", "^", "$"]) or expression.startswith("&&", at):
                raise _Unknown
            if _CLASS.fullmatch(item):
                result.append(self._class(item, inside))
            else:
                result.append("(?:" if item == "(" and not inside else item)
            inside = item == "[" or (inside and item != "]")
            at = match.end()
        return "".join(result)

    def _class(self, name: str, inside: bool) -> str:
        if inside and name[:2] in (r"\S", r"\P", r"\D"):
            raise _Unknown
        if name not in self._tests:
            self._tests[name] = _test_of(name)
        return f"\0{name}\0" if inside else f"[\0{name}\0]"

    def finish(self) -> None:
        """Choose what stands for what, once all expressions are known."""
        examples: dict[str, list[str]] = {}
        for code in range(0x80, 0x20000):
            own = examples.setdefault(unicodedata.category(chr(code)), [])
            if len(own) < 3:
                own.append(chr(code))
        for character in ("\x85", "\xa0", "一", "ぁ", "ァ", "가", *(c for own in examples.values() for c in own)):
            if unicodedata.category(character) != "Cs":
                self._stand_ins.setdefault(self._membership(character), 0x80 + len(self._stand_ins))
        if len(self._stand_ins) > 0x7E:
            raise _Unknown

    def _membership(self, character: str) -> tuple[bool, ...]:
        return tuple(test(character) for test in self._tests.values())

    def stand_in(self, code: int) -> int:
        """Return what stands for a character."""
        if code < 0x80:
            return code
        folded = chr(code).casefold()  # ſ is an s where case does not matter
        if folded.isascii() and folded in self._without_case:
            return _STRANGE
        return self._stand_ins.get(self._membership(chr(code)), _STRANGE)

    def alphabet(self) -> Iterator[str]:
        """Yield all characters that may be in the text that ``re`` sees."""
        yield from map(chr, [*range(0x80), *self._stand_ins.values()])

    def fill(self, expression: str) -> str:
        """Write the members of classes into an expression from :meth:`translate`."""
        names = list(self._tests)

        def members(match: re.Match[str]) -> str:
            position = names.index(match[1])
            ascii_ = [chr(code) for code in range(0x80) if self._tests[match[1]](chr(code))]
            others = [chr(code) for membership, code in self._stand_ins.items() if membership[position]]
            return "".join(map(_literal, [*ascii_, *others]))

        return re.sub("\0([^\0]*)\0", members, expression)


class _Table(dict[int, int]):
    """A table for ``str.translate`` that is filled as characters come up."""

    def __init__(self, make: Callable[[int], int]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, code: int) -> int:
        made = self[code] = self._make(code)
        return made


def _literal(character: str) -> str:
    return f"\\x{ord(character):02x}"


def _test_of(name: str) -> Callable[[str], bool]:
    """Return what asks the library whether a character belongs to a class."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if name == _DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return lambda character: len(digits.pre_tokenize_str("a" + character)) == 2
    try:
        take_out = normalizers.Replace(Regex(name), "")
    except Exception:
        raise _Unknown from None
    return lambda character: take_out.normalize_str(character) == ""


def _compile(expression: str, groups: int) -> re.Pattern[str]:
    try:
        pattern = re.compile(expression, re.ASCII)
    except re.error:  # possessive quantifiers before Python 3.11
        raise _Unknown from None
    if pattern.groups != groups or pattern.match(""):
        raise _Unknown
    return pattern


def mask_between(places: Places, spans: Sequence[Span], tokens: int) -> np.ndarray:
    """Return uint8 [tokens]: 1 for tokens of which a part is in a span, whose edges are among ``places``."""
    mask = np.zeros(tokens, np.uint8)
    for start, end in spans:
        mask[places[start][0] : places[end][1]] = 1
    return mask
