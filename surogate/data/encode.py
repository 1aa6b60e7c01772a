"""Rows to tokens and targets: format, chat template, tokenizer, mask, truncation.

Works on a chunk of rows at a time, so that the tokenizer encodes many texts in one call. Runs in this process or in
worker processes; nothing here depends on which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from surogate.data.chunks import Chunk, Segment
from surogate.data.formats import BadRow, Chat, Completion, Example, Fields, Format, Text, Tokens
from surogate.data.options import DataOptions
from surogate.data.stretch import CONTEXT, LONG_TEXT, STRETCH, stretches
from surogate.data.template import Span, TemplateRefusal
from surogate.data.tokenizer import Tokenizer
from surogate.data.turns import TurnFinder, TurnsNotFound
from surogate.data.words import WordEncoder, mask_between
from surogate.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding

_GROUP = 16
"""Stretches that are encoded in one call."""

TOO_LONG = "longer than sequence_len"
NO_TARGETS = "nothing to train on"
TARGETS_CUT = "all that would be trained is cut off by truncation"


@dataclass
class Dropped:
    """Rows that were left out for one reason. ``invalid``: the row is at fault, not its length or its mask."""

    count: int
    row: int
    detail: str
    invalid: bool


@dataclass
class ChunkResult:
    """What a chunk of rows became.

    Attributes:
        file: index of the file in its data set.
        tokens: int32 [n], all kept rows one after the other.
        mask: uint8 [n]; 1: the token is a training target.
        lengths: int64 [rows kept].
        rows: int64 [rows kept], their numbers in the file, from 1.
        rows_in: rows read.
        cut: rows that were cut.
        dropped: by cause.
        notes: remarks, each once.
        open: the last row goes on in the next chunk.
        size: bytes read, for the progress bar.
    """

    file: int
    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    rows_in: int = 0
    cut: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)
    open: bool = False
    size: int = 0

    def drop(self, row: int, cause: str, detail: str = "", *, invalid: bool = False) -> None:
        entry = self.dropped.setdefault(cause, Dropped(0, row, detail, invalid))
        entry.count += 1


@dataclass
class _Pending:
    row: int
    text: str
    spans: list[Span] | None  # None: every token
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    why_empty: str = ""


class RowEncoder:
    """Turns chunks of rows into tokens. One a process.

    Args:
        tokenizer: with the chat template that is to be used.
        options: of these, objective, lengths, targets and template variables.
    """

    def __init__(self, tokenizer: Tokenizer, options: DataOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.finder = TurnFinder(tokenizer)
        self.train_on: str | frozenset[str] = "all"
        if options.objective != "pt":
            self.train_on = options.train_on if isinstance(options.train_on, str) else frozenset(options.train_on)

    def encode(self, chunk: Chunk, form: Format, fields: Fields) -> ChunkResult:
        """Encode a chunk.

        Raises:
            UserError: the file is damaged, or there is no chat template for a row that needs one.
        """
        if isinstance(chunk, Segment):
            if form.name != "text":
                raise UserError(
                    f"a text file is one document, not rows of type {form.name}",
                    where=chunk.name,
                    expected="type: text, or auto",
                )
            return self._segment(chunk)
        result = ChunkResult(chunk.file, *_nothing(), size=chunk.size)
        kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        pending: list[_Pending] = []
        for row, value in chunk.rows():
            result.rows_in += 1
            try:
                if not isinstance(value, Mapping):
                    raise BadRow("a row is no object", repr(value)[:60])
                example = form.convert(value, fields)
                if isinstance(example, Tokens):
                    if max(example.ids) > np.iinfo(np.int32).max:
                        raise BadRow("'input_ids' has an id beyond 2^31", str(max(example.ids)))
                    ids, mask = np.array(example.ids, np.int32), np.array(example.targets, np.uint8)
                    self._keep(kept, result, row, ids, mask)
                else:
                    pending.append(self._text(row, example))
            except BadRow as bad:
                result.drop(row, bad.cause, bad.detail, invalid=True)
        for item, ids, mask, whole in self._encode(pending):
            self._keep(kept, result, item.row, ids, mask, item.why_empty, whole)
        kept.sort(key=lambda entry: entry[0])
        if kept:
            result.rows = np.array([row for row, _, _ in kept], np.int64)
            result.lengths = np.array([len(ids) for _, ids, _ in kept], np.int64)
            result.tokens = np.concatenate([ids for _, ids, _ in kept])
            result.mask = np.concatenate([mask for _, _, mask in kept])
        result.notes |= self.finder.notes
        return result

    # Examples to texts with spans

    def _text(self, row: int, example: Example) -> _Pending:
        if isinstance(example, Text):
            item = _Pending(row, example.text, None, self.tokenizer.prefix_ids, self._end())
        elif isinstance(example, Completion):
            text = example.prompt + example.completion
            spans = None if self.train_on == "all" else [(len(example.prompt), len(text))]
            item = _Pending(row, text, spans, self.tokenizer.prefix_ids, self._end())
        elif isinstance(example, Chat):
            item = self._chat(row, example)
        else:
            raise TypeError(type(example))
        try:
            item.text.encode()
        except UnicodeEncodeError as error:
            place = f"character {error.start + 1} of the row's text"
            raise BadRow("broken Unicode (half of a surrogate pair)", place) from None
        return item

    def _end(self) -> list[int]:
        suffix, eos = self.tokenizer.suffix_ids, self.tokenizer.eos_id
        if eos is None:
            self.finder.notes.add("the tokenizer names no end-of-text token: documents do not end with one")
            return suffix
        return suffix if suffix[-1:] == [eos] else [*suffix, eos]

    def _chat(self, row: int, chat: Chat) -> _Pending:
        variables = {**self.options.chat_template_kwargs, **chat.variables}
        shown = [{key: value for key, value in m.items() if key != "train"} for m in chat.messages]
        self._remark(chat)
        roles = ", ".join(str(message["role"]) for message in chat.messages[:12])
        roles += ", …" if len(chat.messages) > 12 else ""
        try:
            rendering = self.tokenizer.render(shown, chat.tools, **variables)
            spans = self.finder.targets(
                rendering, chat.messages, chat.tools, variables, self.train_on, chat.completion_from
            )
        except TemplateRefusal as refusal:
            raise BadRow(f"the chat template refuses it: {refusal}", f"roles: {roles}") from None
        except TurnsNotFound as lost:
            raise BadRow(
                "the chat template hides where the assistant's turns begin and end",
                f"{lost}; a template with {{% generation %}} marks, or train_on: all, avoids this",
            ) from None
        trained = {"assistant"} if isinstance(self.train_on, str) else self.train_on
        if any(message["role"] in trained for message in chat.messages):
            why = "no turn that train_on asks for has text, or all say train: false"
        else:
            why = f"no turn of the {' or '.join(sorted(trained))}"
        return _Pending(row, rendering.text, spans, why_empty=f"{why}; roles: {roles}")

    def _remark(self, chat: Chat) -> None:
        """Say so when a row has something that the template never shows."""
        source = self.tokenizer.template_for(chat.tools).source
        held = {"tools": chat.tools is not None}
        for key in ("tool_calls", "reasoning_content"):
            held[key] = any(key in message for message in chat.messages)
        for key, there in held.items():
            if there and key not in source and not (key == "reasoning_content" and "thinking" in source):
                self.finder.notes.add(
                    f"rows have {key}, which the chat template does not show: they are not trained on"
                )

    # Texts to tokens

    def _encode(self, pending: list[_Pending]) -> Iterator[tuple[_Pending, np.ndarray, np.ndarray, bool]]:
        """Yield each text with its ids, its mask, and whether these are all (a text that is too long is let be)."""
        short = [item for item in pending if len(item.text) < LONG_TEXT]
        plain = [item for item in short if item.spans is None]
        for item, ids in zip(plain, self._ids([item.text for item in plain]), strict=True):
            ids = np.concatenate([np.array(item.prefix, np.int32), ids, np.array(item.suffix, np.int32)])
            yield item, ids, np.ones(len(ids), np.uint8), True
        left = []
        for item in short:
            if item.spans is not None:
                found = self._masked(item.text, item.spans)
                if found is None:
                    left.append(item)
                else:
                    yield (item, *self._framed(item, *found), True)
        encodings = self.tokenizer.backend.encode_batch([item.text for item in left], add_special_tokens=False)
        for item, encoding in zip(left, encodings, strict=True):
            mask = mask_of(encoding, item.spans or (), item.text)
            yield (item, *self._framed(item, np.array(encoding.ids, np.int32), mask), True)
        for item in pending:
            if len(item.text) >= LONG_TEXT:
                yield (item, *self._long(item))

    @cached_property
    def _words(self) -> WordEncoder | None:
        return WordEncoder.of(self.tokenizer.backend)

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int32 ids of each text."""
        found = [None] * len(texts) if self._words is None else [self._words.encode(text) for text in texts]
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        others = iter(self.tokenizer.backend.encode_batch_fast(left, add_special_tokens=False))
        return [np.array(next(others).ids, np.int32) if ids is None else ids for ids in found]

    def _masked(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ids and mask, ``None`` where only the library can tell them."""
        if self._words is None:
            return None
        own = [span for span in spans if span[1] > span[0]]
        found = self._words.encode_with_places(text, chain.from_iterable(own))
        if found is None:
            return None
        ids, places = found
        return ids, mask_between(places, own, len(ids))

    def _framed(self, item: _Pending, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if item.prefix or item.suffix:
            ids = np.concatenate([np.array(item.prefix, np.int32), ids, np.array(item.suffix, np.int32)])
            mask = np.concatenate([np.zeros(len(item.prefix)), mask, np.ones(len(item.suffix))]).astype(np.uint8)
        return ids, mask

    def _long(self, item: _Pending) -> tuple[np.ndarray, np.ndarray, bool]:
        """Encode a text of any length, stretch by stretch; only so far as anything of it can be kept.

        Returns:
            Ids, mask, and whether these are all.
        """
        enough = self.options.sequence_len
        if self.options.splits_rows or self.options.truncation == "left":
            enough = len(item.text) + 1
        ids, mask = self._stretches(item.text, 0, len(item.text), item.spans, enough)
        if len(ids) > enough:
            item.suffix = ()
        framed, mask = self._framed(item, ids, mask)
        return framed, mask if item.spans is not None else np.ones(len(framed), np.uint8), len(ids) <= enough

    def _stretches(
        self, text: str, first: int, last: int, spans: Sequence[Span] | None, enough: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask of the tokens of ``text`` that begin in ``[first, last)``.

        Every stretch gives the tokens that begin in it; so each token is given once, and those at the cuts are what
        they would be in the whole text. After more than ``enough`` tokens the rest is left out.
        """
        own = [(first + start, first + end) for start, end in stretches(text[first:last], STRETCH)]
        all_ids, all_masks = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
        count = 0
        for group in range(0, len(own), _GROUP):
            for ids, mask in self._group(text, own[group : group + _GROUP], spans):
                all_ids.append(ids)
                all_masks.append(mask)
                count += len(ids)
            if count > enough:
                break
        return np.concatenate(all_ids), np.concatenate(all_masks)

    def _group(
        self, text: str, own: Sequence[Span], spans: Sequence[Span] | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and mask of each of some stretches that follow one another."""
        if spans is not None:
            yield from self._with_context(text, own, spans)
            return
        clean = self._clean_cuts(text, [own[0][0], *(end for _, end in own)])
        alone = [a and b for a, b in zip(clean, clean[1:], strict=False)]
        encoded = self._alone(text, [edges for edges, ok in zip(own, alone, strict=True) if ok])
        other = self._with_context(text, [edges for edges, ok in zip(own, alone, strict=True) if not ok], None)
        for ok in alone:
            yield next(encoded if ok else other)

    def _clean_cuts(self, text: str, cuts: Sequence[int]) -> list[bool]:
        """Say of each place whether the text has the same ids when it is cut there."""
        around = [(text[max(0, cut - CONTEXT) : cut], text[cut : cut + CONTEXT]) for cut in cuts]
        texts = [part for left, right in around for part in (left, right, left + right)]
        ids = [part.tolist() for part in self._ids(texts)]
        return [left + right == whole for left, right, whole in zip(ids[::3], ids[1::3], ids[2::3], strict=True)]

    def _alone(self, text: str, own: Sequence[Span]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Encode stretches between clean cuts: without context, and without the ranges of tokens, which take time."""
        for ids in self._ids([text[start:end] for start, end in own]):
            yield ids, np.ones(len(ids), np.uint8)

    def _with_context(
        self, text: str, own: Sequence[Span], spans: Sequence[Span] | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Encode stretches with some of the text around them, and take the tokens that begin inside."""
        windows = [(max(0, start - CONTEXT), min(len(text), end + CONTEXT)) for start, end in own]
        texts = [text[start:end] for start, end in windows]
        encodings = self.tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        for (start, end), (base, _), part, encoding in zip(own, windows, texts, encodings, strict=True):
            kept = slice(first_from(encoding, start - base, part), first_from(encoding, end - base, part))
            ids = np.array(encoding.ids[kept], np.int32)
            mask = np.ones(len(ids), np.uint8)
            if spans is not None:
                inside = [(max(0, a - base), min(len(part), b - base)) for a, b in spans]
                mask = mask_of(encoding, inside, part)[kept]
            yield ids, mask

    def _segment(self, chunk: Segment) -> ChunkResult:
        """Encode a part of a document that is read part by part."""
        text = chunk.before + chunk.text + chunk.after
        first, last = len(chunk.before), len(chunk.before) + len(chunk.text)
        ids, _ = self._stretches(text, first, last, None, len(text))
        head = self.tokenizer.prefix_ids if chunk.opens else []
        tail = self._end() if chunk.last else []
        ids = np.concatenate([np.array(head, np.int32), ids, np.array(tail, np.int32)])
        result = ChunkResult(chunk.file, ids, np.ones(len(ids), np.uint8), np.array([len(ids)]), np.array([1]))
        if chunk.opens:
            result.mask[:1] = 0
        result.rows_in, result.open, result.size = int(chunk.last), not chunk.last, chunk.size
        result.notes |= self.finder.notes
        return result

    # Lengths

    def _keep(
        self,
        kept: list[tuple[int, np.ndarray, np.ndarray]],
        result: ChunkResult,
        row: int,
        ids: np.ndarray,
        mask: np.ndarray,
        why_empty: str = "",
        whole: bool = True,
    ) -> None:
        mask[:1] = 0  # nothing stands before the first token, so it is never a target
        if whole and not mask.any():
            result.drop(row, NO_TARGETS, why_empty)
            return
        limit = self.options.sequence_len
        if len(ids) > limit and not self.options.splits_rows:
            tokens = f"{len(ids)} tokens" if whole else f"more than {limit} tokens"
            if self.options.truncation == "drop":
                result.drop(row, TOO_LONG, f"{tokens}, sequence_len is {limit}")
                return
            cut = slice(-limit, None) if self.options.truncation == "left" else slice(None, limit)
            ids, mask = ids[cut], mask[cut].copy()
            mask[:1] = 0
            if not mask.any():
                result.drop(row, TARGETS_CUT, f"{tokens}, sequence_len is {limit}")
                return
            result.cut += 1
        kept.append((row, ids, mask))


def _nothing() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64)


def overlapping(starts: np.ndarray, ends: np.ndarray, start: int, end: int) -> np.ndarray:
    """Which tokens stand for a character of ``[start, end)``; a token for no character belongs where it stands."""
    inside: np.ndarray = (starts < end) & ((ends > start) | ((starts == ends) & (starts >= start)))
    return inside


def first_from(encoding: Encoding, place: int, text: str) -> int:
    """Return the index of the first token that begins at character ``place`` of ``text`` or behind it."""
    if place >= len(text):
        return len(encoding.ids)
    index = encoding.char_to_token(place)
    edge = None if index is None else encoding.token_to_chars(index)
    if index is None or edge is None:
        return int(np.searchsorted(np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0], place))
    return index + int(edge[0] < place)


def mask_of(encoding: Encoding, spans: Sequence[Span], text: str) -> np.ndarray:
    """Return uint8 [tokens]: 1 for each token that stands for a character of a span.

    A token across an edge counts as inside: the model has to produce it to produce the characters inside.
    """
    mask = np.zeros(len(encoding.ids), np.uint8)
    for start, end in spans:
        if start >= end:
            continue
        # Asking for the two edges is several times faster than fetching every token's range.
        first = encoding.char_to_token(start)
        behind = len(mask) if end >= len(text) else encoding.char_to_token(end)
        if first is None or behind is None:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            mask |= overlapping(offsets[:, 0], offsets[:, 1], start, end).astype(np.uint8)
            continue
        if behind < len(mask):
            edge = encoding.token_to_chars(behind)
            behind += int(edge is not None and edge[0] < end)
        mask[first:behind] = 1
    return mask
