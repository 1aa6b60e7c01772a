"""Running text: every token is trained."""

from __future__ import annotations

from surogate.data.formats._base import Example, Fields, Format, Row, Text, find_field, need_field, text_of

_TEXT = ("text", "content", "document")


class PlainText(Format):
    """``text``: one document. It begins and ends as the tokenizer begins and ends a text, EOS included."""

    name = "text"
    summary = "text"
    rank = 40

    def recognise(self, row: Row, fields: Fields) -> str | None:
        name = find_field(row, fields, "text_field", _TEXT)
        return f"field {name}" if name is not None else None

    def convert(self, row: Row, fields: Fields) -> Example:
        return Text(text_of(row, need_field(row, fields, "text_field", _TEXT), empty=False))


FORMAT = PlainText()
