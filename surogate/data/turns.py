"""Which characters of a rendered conversation are training targets.

A turn of the assistant is trained from the first character that the model itself has to produce to its end-of-turn
token. Both edges come from the one rendering of the row: the template's own ``{% generation %}`` marks where it has
them, else the region of the message (see :mod:`surogate.data.template`) without the head that the generation prompt
already holds and without what follows the end-of-turn token. Text is never searched for, so equal answers, answers
that contain markup, and templates that rewrite messages make no difference.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from surogate.data.template import Rendering, Span, TemplateRefusal
from surogate.data.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]

_PROBE = "\ue000probe\ue001"  # private use: never trimmed, never a tag, never the beginning of a template's markup


class TurnsNotFound(Exception):
    """The turns of the assistant cannot be told from the rest of the rendering. The text says which and why."""


@dataclass(frozen=True)
class _Frame:
    """What a template puts around the text of a plain assistant turn.

    Attributes:
        prompt: what ``add_generation_prompt`` adds to a conversation that ends with a user's turn.
        heads: text before the content, for a last turn and for one in the middle.
        tails: text after the content, likewise.
    """

    prompt: str
    heads: tuple[str, ...]
    tails: tuple[str, ...]


def _common_prefix(*texts: str) -> str:
    return os.path.commonprefix(texts)


class TurnFinder:
    """Finds the supervised characters of rendered conversations. Remembers what it learnt about the templates."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._frames: dict[str, _Frame] = {}
        self._specials: tuple[str, ...] | None = None
        self.notes: set[str] = set()
        """Remarks for the report, each once."""

    @property
    def _special(self) -> tuple[str, ...]:
        if self._specials is None:
            self._specials = tuple(token for token in self.tokenizer.special_tokens if token.strip())
        return self._specials

    def targets(
        self,
        rendering: Rendering,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        train_on: str | Set[str],
        completion_from: int | None = None,
    ) -> list[Span]:
        """Return the ranges of characters that are training targets, in order, without overlap.

        Args:
            rendering: of all ``messages``, with ``tools`` and ``variables``.
            messages: the turns; ``train: false`` in one leaves it out wholly, its end-of-turn token included.
            tools: as rendered.
            variables: as rendered.
            train_on: ``assistant``, ``last_turn``, ``all`` or ``completion_only``; or a set of roles.
            completion_from: index of the first message that is completion; for ``completion_only``. Unknown: what
                follows the last turn of the user.

        Raises:
            TurnsNotFound: the template hides where a turn begins and ends.
        """
        if train_on == "all":
            return self._everything(rendering, messages, tools, variables)
        if not isinstance(train_on, str):
            others = self._of_roles(rendering, messages, tools, variables, train_on - {"assistant"})
            if "assistant" not in train_on:
                return others
            return sorted([*others, *self.targets(rendering, messages, tools, variables, "assistant")])
        wanted = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if train_on == "last_turn":
            wanted = wanted[-1:]
        elif train_on == "completion_only":
            if completion_from is None:
                completion_from = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1) + 1
            wanted = [i for i in wanted if i >= completion_from]
        wanted = [i for i in wanted if messages[i].get("train") is not False]
        if not wanted:
            return []
        if rendering.generated:
            return self._marked(rendering, messages, wanted)
        regions = self._regions(rendering, messages, tools, variables, wanted)
        frame = self._frame(tools, variables)
        spans = []
        for index, region in zip(wanted, regions, strict=True):
            start, end = self._own(rendering.text, region, index, frame, messages, tools, variables)
            if index + 1 < len(messages) and messages[index + 1].get("role") == "tool":
                if rendering.regions[index + 1] is None:
                    # The tool's answer is put out with the turn that asked for it. What that turn has without it is
                    # its own.
                    alone = self._without_answer(messages[: index + 1], index, tools, variables)
                    same = takewhile(lambda pair: pair[0] == pair[1], zip(rendering.pieces, alone, strict=False))
                    end = min(end, sum(len(piece) for piece, _ in same))
            if end > start:
                spans.append((start, end))
        return spans

    def _without_answer(
        self, messages: Messages, index: int, tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> list[str]:
        try:
            return self.tokenizer.render(messages, tools, **variables).pieces
        except TemplateRefusal as refusal:
            raise TurnsNotFound(f"turn {index + 1}: the template shows it only with what follows ({refusal})") from None

    def _of_roles(
        self,
        rendering: Rendering,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        roles: Set[str],
    ) -> list[Span]:
        """Return the turns of other roles, each from its content to its end-of-turn token.

        No prompt asks the model for such a turn, so nothing but the content says where it begins. Rendering the
        conversation with a probe in its place shows what the template puts before and behind it.
        """
        wanted = [i for i, m in enumerate(messages) if m.get("role") in roles and m.get("train") is not False]
        spans = []
        for index, region in zip(wanted, self._regions(rendering, messages, tools, variables, wanted), strict=True):
            probed = [dict(message, content=_PROBE) if i == index else message for i, message in enumerate(messages)]
            try:
                before, found, behind = self.tokenizer.render(probed, tools, **variables).text.partition(_PROBE)
            except TemplateRefusal as refusal:
                raise TurnsNotFound(f"turn {index + 1}: {refusal}") from None
            text = rendering.text
            end = len(text) - len(behind)
            if (
                not found
                or _PROBE in behind
                or end < len(before)
                or (before, behind) != (text[: len(before)], text[end:])
            ):
                raise TurnsNotFound(f"turn {index + 1}: what stands around its content depends on the content")
            tail = text[end : region[1]]
            ends = [tail.find(token) + len(token) for token in self._special if token in tail]
            end += min(ends, default=len(tail.rstrip()))
            if end > len(before):
                spans.append((len(before), end))
        return spans

    def _everything(
        self, rendering: Rendering, messages: Messages, tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> list[Span]:
        hidden = [i for i, message in enumerate(messages) if message.get("train") is False]
        spans, position = [], 0
        for start, end in self._regions(rendering, messages, tools, variables, hidden):
            spans.append((position, start))
            position = end
        spans.append((position, len(rendering.text)))
        return [span for span in spans if span[1] > span[0]]

    def _marked(self, rendering: Rendering, messages: Messages, wanted: list[int]) -> list[Span]:
        """Take the template's own generation marks, each given to the message in whose region it lies."""
        assistants = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        spans = []
        owned = dict(zip(assistants, rendering.generated, strict=False))
        one_each = len(assistants) == len(rendering.generated)
        for index in wanted:
            region = rendering.regions[index]
            if region is not None:
                spans += [s for s in rendering.generated if region[0] <= s[0] and s[1] <= region[1] and s[1] > s[0]]
            elif one_each:
                spans.append(owned[index])
            else:
                raise TurnsNotFound(
                    f"the template marks {len(rendering.generated)} generations for {len(assistants)} assistant turns"
                )
        text = rendering.text
        for start, end in spans:
            after = text[end:]
            if not text[start:end].rstrip().endswith(self._special) and after.startswith(self._special):
                self.notes.add(
                    "the template's {% generation %} block leaves out the end-of-turn token, so the model does not "
                    "learn to end its turns"
                )
        return spans

    def _regions(
        self,
        rendering: Rendering,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        wanted: list[int],
    ) -> list[Span]:
        """Return where each wanted message is rendered."""
        regions = []
        for index in wanted:
            region = rendering.regions[index]
            if region is None:
                # The template collects its output. Rendering the beginning of the conversation alone gives the same
                # edges, if that really is the beginning of the whole; where it is not, nothing is assumed.
                start = len(self._beginning(rendering, messages[:index], index, tools, variables)) if index else 0
                end = len(self._beginning(rendering, messages[: index + 1], index, tools, variables))
                region = (start, end)
            regions.append(region)
        return regions

    def _beginning(
        self,
        rendering: Rendering,
        messages: Messages,
        index: int,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> str:
        try:
            text = self.tokenizer.render(messages, tools, **variables).text
        except TemplateRefusal as refusal:
            raise TurnsNotFound(f"turn {index + 1}: the template refuses the turns before it ({refusal})") from None
        if not rendering.text.startswith(text):
            raise TurnsNotFound(f"turn {index + 1}: earlier turns are rendered differently when later ones follow")
        return text

    def _own(
        self,
        text: str,
        region: Span,
        index: int,
        frame: _Frame,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> Span:
        """Cut the head and what follows the end-of-turn token off the region of an assistant turn."""
        start = region[0] + self._head(text, region, index, frame, messages, tools, variables)
        shown = text[slice(*region)]
        body = shown.rstrip()
        tail = max((tail for tail in frame.tails if tail.strip() and shown.endswith(tail)), key=len, default="")
        if tail:
            # The template ends every plain turn so: with a token that ends it, perhaps more behind it, or with text.
            ends = [tail.find(token) + len(token) for token in self._special if token in tail]
            end = region[1] - len(tail) + min(ends, default=len(tail.rstrip()))
        elif body.endswith(self._special):
            end = region[0] + len(body)
        else:
            spaces = [tail for tail in frame.tails if shown.endswith(tail)]
            end = region[1] - len(max(spaces, key=len)) if spaces else region[0] + len(body)
            end = self._ended_behind(text, end, region[1], index == len(messages) - 1)
        return start, max(start, end)

    def _ended_behind(self, text: str, end: int, edge: int, last: bool) -> int:
        """Some templates put the end token of the last turn behind the loop over messages."""
        if last:
            for token in self._special:
                if text.startswith(token, edge):
                    return edge + len(token)
        self.notes.add(
            "the chat template puts no end-of-turn token after an assistant turn: the model cannot learn to stop"
        )
        return end

    def _head(
        self,
        text: str,
        region: Span,
        index: int,
        frame: _Frame,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> int:
        """Return how many characters of the region the prompt already holds when the model is asked for this turn.

        Raises:
            TurnsNotFound: the region begins in none of the ways that are known of this template.
        """
        shown = text[slice(*region)]
        after_user = index > 0 and messages[index - 1].get("role") == "user"
        if frame.prompt and after_user and shown.startswith(frame.prompt):
            return len(frame.prompt)
        if index and not after_user:
            # After a tool's answer or another assistant turn templates prompt in other ways: ask this one.
            asked = self._asked(text, region, messages[:index], tools, variables)
            if asked:
                return asked
        head = _common_prefix(*frame.heads) if frame.heads else frame.prompt
        if frame.prompt:
            # A prompt that holds more than finished turns do (an opened <think>, say): only what they share is head.
            head = _common_prefix(frame.prompt, head)
        if not head.strip() and frame.heads:
            return 0  # nothing but a space, which the model writes itself
        for known in (head, head.rstrip()):  # a turn of tool calls alone may lack the line break of the head
            if known and shown.startswith(known):
                return len(known)
        asked = self._asked(text, region, messages[:index], tools, variables) if index else None
        if asked == 0 and frame.prompt and not after_user:
            return 0  # the turn before goes on, and the template asks for more of it by adding nothing
        found = asked or (self._opening(shown, frame, tools, variables) if index == 0 else 0)
        if not found:
            raise TurnsNotFound(f"turn {index + 1} begins in a way that is not known: {shown[:40]!r}")
        return found

    def _asked(
        self, text: str, region: Span, before: Messages, tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> int | None:
        """Return how far the prompt for a turn reaches into its region, if the text begins with that prompt."""
        try:
            prompt = self.tokenizer.render(before, tools, True, **variables).text
        except TemplateRefusal:
            return None
        return len(prompt) - region[0] if region[0] <= len(prompt) <= region[1] and text.startswith(prompt) else None

    def _opening(self, shown: str, frame: _Frame, tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> int:
        """Return the length of what stands before an assistant turn that opens the conversation."""
        try:
            rendering = self.tokenizer.render([{"role": "assistant", "content": _PROBE}], tools, **variables)
        except TemplateRefusal:
            return 0
        region = rendering.regions[0] or (0, len(rendering.text))
        head = rendering.text[slice(*region)].partition(_PROBE)[0]
        if frame.prompt and frame.prompt in head:  # a default system turn, say, and then the head
            head = head[: head.rindex(frame.prompt) + len(frame.prompt)]
        return len(head) if shown.startswith(head) else 0

    def _frame(self, tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> _Frame:
        key = json.dumps([tools is not None, variables], sort_keys=True, default=str)
        if key not in self._frames:
            self._frames[key] = self._probe(tools, variables)
        return self._frames[key]

    def _probe(self, tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> _Frame:
        user, answer = {"role": "user", "content": "probe"}, {"role": "assistant", "content": _PROBE}
        prompt = ""
        try:
            asked = self.tokenizer.render([user], tools, True, **variables)
            plain = self.tokenizer.render([user], tools, False, **variables)
            region = asked.regions[0]
            if asked.text == plain.text:
                pass  # the template knows no generation prompt
            elif region is not None:
                prompt = asked.text[region[1] :]
            elif asked.text.startswith(plain.text):
                prompt = asked.text[len(plain.text) :]
        except TemplateRefusal:
            pass
        heads, tails = [], []
        for messages in ([user, answer], [user, answer, user]):
            try:
                rendering = self.tokenizer.render(messages, tools, **variables)
                region = self._regions(rendering, messages, tools, variables, [1])[0]
            except (TemplateRefusal, TurnsNotFound):
                continue
            head, found, tail = rendering.text[slice(*region)].partition(_PROBE)
            if found:
                heads.append(head)
                tails.append(tail)
        return _Frame(prompt, tuple(heads), tuple(tails))
