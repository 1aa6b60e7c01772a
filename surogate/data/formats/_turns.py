"""Turns of a conversation, in the spellings that are about, to the one that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from surogate.data.formats._base import BadRow, kind, shorten

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_SPOKEN = ("system", "user", "assistant", "tool")
_ROLE, _CONTENT = ("role", "from"), ("content", "value")
_TRAIN = ("train", "loss", "weight")
_PLAIN = {"role", "content"}
_USED = {*_ROLE, *_CONTENT, *_TRAIN}


def messages_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return turns with ``role``, ``content`` and whatever else they hold.

    Args:
        value: a list of turns, or its JSON text.
        where: the column, for messages.

    Raises:
        BadRow: something in it cannot be trained as it is meant.
    """
    turns = from_json(value)
    if not isinstance(turns, list):
        raise BadRow(f"{where!r} is {kind(turns)}, not a list of turns", shorten(turns) if turns is not None else "")
    if not turns:
        raise BadRow(f"{where!r} has no turns")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def from_json(value: Any) -> Any:
    """Return what a text holds as JSON, where columns cannot hold lists (CSV) or sets store them as text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _message(turn: Any, number: int) -> dict[str, Any]:
    if type(turn) is dict and turn.keys() == _PLAIN and turn["role"] in _SPOKEN and type(turn["content"]) is str:
        return {"role": turn["role"], "content": turn["content"]}  # nearly all turns are so
    if not isinstance(turn, Mapping):
        raise BadRow(f"a turn is {kind(turn)}, not an object", f"turn {number}: {shorten(turn)}")
    role_key = next((key for key in _ROLE if turn.get(key) is not None), None)
    if role_key is None:
        raise BadRow("a turn has no role", f"turn {number}: keys {', '.join(map(str, turn))}")
    role = turn[role_key]
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"unknown role {shorten(role)}", f"turn {number}; known roles: {', '.join(ROLES)}")
    content_key = next((key for key in _CONTENT if turn.get(key) is not None), None)
    message: dict[str, Any] = {"role": known}
    content = None if content_key is None else _content(turn[content_key], number)
    message.update({key: without_nulls(v) for key, v in turn.items() if key not in _USED and v is not None})
    if isinstance(role, str) and role.strip().lower() == "function_call" and content:
        call = from_json(content)
        if isinstance(call, (dict, list)):
            message["tool_calls"], content = (call if isinstance(call, list) else [call]), None
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, number) for call in _listed(message["tool_calls"], number)]
    else:
        message.pop("tool_calls", None)
    if content is not None:
        message["content"] = content
    elif not message.get("tool_calls") and not message.get("reasoning_content"):
        raise BadRow("a turn's content is null", f"turn {number} ({known})")
    if _trained(turn, number) is False:
        message["train"] = False
    return message


def _content(value: Any, number: int) -> str:
    """Return text; a list of parts is joined where all are text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = []
        for part in value:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                what = part.get("type", "an object") if isinstance(part, Mapping) else kind(part)
                raise BadRow(f"a part of a turn's content is {what}, not text", f"turn {number}: {shorten(part)}")
        return "".join(texts)
    raise BadRow(f"a turn's content is {kind(value)}, not text", f"turn {number}: {shorten(value)}")


def _listed(calls: Any, number: int) -> list[Any]:
    calls = from_json(calls)
    if not isinstance(calls, list):
        raise BadRow(f"tool_calls is {kind(calls)}, not a list", f"turn {number}")
    return calls


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """Return ``{"type": "function", "function": {"name", "arguments"}}`` with the arguments as an object.

    Servers hand templates objects, while stored conversations mostly hold the arguments' JSON text.
    """
    call = from_json(call)
    if not isinstance(call, Mapping):
        raise BadRow(f"a tool call is {kind(call)}, not an object", f"turn {number}")
    if "function" not in call and "name" in call:
        call = {"type": "function", "function": dict(call)}
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call names no function", f"turn {number}: {shorten(call)}")
    return {**call, "function": {**function, "arguments": from_json(function.get("arguments", {}))}}


def _trained(turn: Mapping[str, Any], number: int) -> bool | None:
    for key in _TRAIN:
        value = turn.get(key)
        if value is None:
            continue
        if value in (0, 1):  # also false and true
            return bool(value)
        raise BadRow(f"a turn's {key!r} is neither true nor false", f"turn {number}: {key} = {shorten(value)}")
    return None


def without_nulls(value: Any) -> Any:
    """Drop keys whose value is null, at any depth: columnar files give every object the keys of all objects."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
