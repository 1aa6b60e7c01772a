"""A prompt and its completion: two plain texts, or two lists of turns."""

from __future__ import annotations

from surogate.data.formats._base import (
    Chat,
    Completion,
    Example,
    Fields,
    Format,
    Row,
    find_field,
    need_field,
    text_of,
)
from surogate.data.formats._turns import from_json, messages_of, without_nulls

_PROMPT = ("prompt",)
_COMPLETION = ("completion", "response", "answer", "output")


class PromptCompletion(Format):
    """``prompt`` and ``completion``.

    Texts are joined as they are, without chat template, and end with the tokenizer's EOS; lists of turns go through the
    template. Only the completion is trained (with ``train_on: all`` the prompt too).
    """

    name = "prompt_completion"
    summary = "prompt, completion"
    rank = 20

    def recognise(self, row: Row, fields: Fields) -> str | None:
        prompt = find_field(row, fields, "prompt_field", _PROMPT)
        completion = find_field(row, fields, "completion_field", _COMPLETION)
        return f"fields {prompt}, {completion}" if prompt and completion else None

    def convert(self, row: Row, fields: Fields) -> Example:
        prompt = need_field(row, fields, "prompt_field", _PROMPT)
        completion = need_field(row, fields, "completion_field", _COMPLETION)
        asked, answered = row[prompt], row[completion]
        if isinstance(asked, list) or isinstance(answered, list):
            before, after = messages_of(asked, prompt), messages_of(answered, completion)
            tools = from_json(row.get("tools"))
            return Chat([*before, *after], without_nulls(tools) if tools else None, completion_from=len(before))
        return Completion(text_of(row, prompt), text_of(row, completion, empty=False))


FORMAT = PromptCompletion()
