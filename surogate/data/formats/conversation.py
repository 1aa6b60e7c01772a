"""A list of turns: ``messages`` with ``role`` and ``content``, or ``conversations`` with ``from`` and ``value``."""

from __future__ import annotations

from surogate.data.formats._base import (
    BadRow,
    Chat,
    Example,
    Fields,
    Format,
    Row,
    find_field,
    kind,
    need_field,
    text_of,
)
from surogate.data.formats._turns import from_json, messages_of, without_nulls

_MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
_SYSTEM = ("system", "system_prompt")


class Conversation(Format):
    """Turns, and beside them perhaps ``system``, ``tools`` and ``chat_template_kwargs``.

    A turn may say ``train: false`` (or ``loss``, or ``weight: 0``), and then nothing of it is trained.
    """

    name = "conversation"
    summary = "messages (role, content) or conversations (from, value)"
    rank = 10

    def recognise(self, row: Row, fields: Fields) -> str | None:
        name = find_field(row, fields, "messages_field", _MESSAGES)
        if name is None:
            return None
        value = from_json(row[name])
        if value is not None and not isinstance(value, list) and "messages_field" not in fields:
            return None
        return f"field {name}, a list of turns"

    def convert(self, row: Row, fields: Fields) -> Example:
        name = need_field(row, fields, "messages_field", _MESSAGES)
        messages = messages_of(row[name], name)
        system = find_field(row, fields, "system_field", _SYSTEM)
        if system is not None and row[system] is not None and messages[0]["role"] not in ("system", "developer"):
            text = text_of(row, system)
            if text.strip():
                messages.insert(0, {"role": "system", "content": text})
        tools = from_json(row.get("tools"))
        if tools is not None and not isinstance(tools, list):
            raise BadRow(f"'tools' is {kind(tools)}, not a list")
        variables = from_json(row.get("chat_template_kwargs"))
        if variables is not None and not isinstance(variables, dict):
            raise BadRow(f"'chat_template_kwargs' is {kind(variables)}, not an object")
        cleaned = [without_nulls(from_json(tool)) for tool in tools] if tools else None
        return Chat(messages, cleaned, without_nulls(variables or {}))


FORMAT = Conversation()
