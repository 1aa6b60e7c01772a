"""What to say about a wrong key or value. Everything is derived from the schema; nothing here knows a key."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from surogate.config import yaml_tree
from surogate.config.schema import NOT_NEEDED, REFUSED_VALUES, RENAMED_VALUES, note, raw_schema
from surogate.errors import UserError


@lru_cache(maxsize=1)
def _schema() -> dict[str, Any]:
    return raw_schema()


def fragment(path: str) -> dict[str, Any] | None:
    """Return the JSON Schema of the key at ``path`` (``datasets.0.path``), or None if there is no such key."""
    here: dict[str, Any] | None = _schema()
    for part in path.split(".") if path else []:
        if here is None:
            return None
        options = [here, *here.get("anyOf", [])]
        if part.isdigit():
            here = next((o["items"] for o in options if "items" in o), None)
        else:
            here = next((o["properties"][part] for o in options if part in o.get("properties", {})), None)
    return here


def describe(schema: Mapping[str, Any]) -> str:
    """Say in words what values ``schema`` allows, e.g. ``a whole number >= 1``."""
    if "anyOf" in schema:
        parts = [describe(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", {})
        if "enum" in items:
            return "a list of " + ", ".join(map(str, items["enum"]))
        return "a list of " + ("mappings" if items.get("type") == "object" else "names")
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "object": "a mapping"}
    text = words.get(str(kind), "text")
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema and schema[name] < 2**53]
    return f"{text} {' and '.join(limits)}" if limits else text


def kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that ``schema`` allows."""
    options = schema.get("anyOf", [schema])
    return {str(option.get("type", "string")) for option in options}


def choices(schema: Mapping[str, Any]) -> list[str]:
    """Return the words that ``schema`` allows; empty if it does not enumerate any."""
    options = schema.get("anyOf", [schema])
    return [str(c) for o in options for c in o.get("enum", [o["const"]] if "const" in o else [])]


def _foreign(properties: Mapping[str, Any], word: str) -> tuple[str, str | None] | None:
    """Return our key for another trainer's, and what to write instead if the value changes too."""
    for key, schema in properties.items():
        notes = note(schema)
        if word in notes.get("also", ()):
            return key, None
        if word in notes.get("instead", {}):
            return key, notes["instead"][word]
    return None


def unknown_key(key: str, value: Any, text: str | None, path: str, where: str) -> UserError:
    """Say what to write instead of ``key: value`` in the mapping at ``path``.

    Looked for, in this order: other spelling, other trainers' names, what is not needed here, another level of the
    file, the nearest key. ``text`` is the value as it was written, if it is a bare scalar.
    """
    properties: dict[str, Any] = (fragment(path) or {})["properties"]
    word = key.lower().replace("-", "_")
    shown = text if text is not None else flow(value)
    what = f"unknown key '{key}'"
    if word in properties:
        return UserError(what, where=where, fix=f"write {word}: {shown}")
    if found := _foreign(properties, word):
        ours, line = found
        return UserError(
            what, where=where, expected=f"{ours} (as it is called here)", fix=_instead(ours, line, value, shown)
        )
    if not path:
        for pattern, reason in NOT_NEEDED.items():
            if fnmatch.fnmatchcase(word, pattern):
                return UserError(what, where=where, fix=reason)
    above: dict[str, Any] = _schema()["properties"]
    if path and word in above:
        return UserError(what, where=where, fix=f"{word} stands at the top level, not in {path.split('.')[0]}")
    inner = above["datasets"]["items"]["properties"]
    entry = word if word in inner else (_foreign(inner, word) or ("",))[0]
    if not path and entry:
        return UserError(what, where=where, fix=f"write {entry}: {shown} in an entry of datasets, not at the top level")
    near = difflib.get_close_matches(word, list(properties), n=1, cutoff=0.6)
    if near:
        return UserError(what, where=where, fix=f"write {near[0]}: {shown}")
    return UserError(what, where=where, expected="a key of docs/config.md", fix="leave the line out")


def _instead(ours: str, line: str | None, value: Any, shown: str) -> str:
    """Return what to write for a foreign key.

    ``line`` is None if the value stays the same, else what to write; ``A | B`` is A for true and B for false.
    """
    if line is None:
        return f"write {ours}: {shown}"
    yes, _, no = line.partition(" | ")
    if value in (False, None, "no", "none", "off", "full"):
        return f"write {no}" if no else "leave the line out"
    return f"write {yes}"


def flow(value: Any) -> str:
    """Return ``value`` as one line of YAML."""
    if value is None:
        return "null"
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    text = text.strip().removesuffix("...").strip()
    return text if len(text) <= 80 else "..."


def show(value: Any) -> str:
    """Say what ``value`` is, e.g. ``'abc' (text)``."""
    words = {bool: "truth value", int: "whole number", float: "number", str: "text", type(None): "nothing"}
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    shown = repr(value) if isinstance(value, str) else flow(value)
    return f"{shown} ({words.get(type(value), type(value).__name__)})"


def example(name: str, schema: Mapping[str, Any]) -> str:
    """Return a line that gives the key ``name``, with the schema's example for a value."""
    return f"{name}: {flow(schema['examples'][0]) if 'examples' in schema else '...'}"


def fix_for(path: str, value: Any, schema: Mapping[str, Any]) -> str:
    """Return the smallest change that makes ``value`` fit ``schema``, or nothing if there is no telling."""
    name = path.rpartition(".")[2]
    if name.isdigit():
        name = "-"
    head = f"write {name}: " if name != "-" else "write - "
    allowed = kinds(schema)
    if value is None:
        return "leave the line out, or write a value"
    if isinstance(value, str):
        if ours := RENAMED_VALUES.get((path, value)):
            return head + ours
        if reason := REFUSED_VALUES.get((path, value)):
            return reason
        read = yaml_tree.scalar(value.replace("_", "").replace(",", ""))
        if isinstance(read, bool) and "boolean" in allowed:
            return f"{head}{value.lower()} (without quotes)"
        if isinstance(read, int) and "integer" in allowed or isinstance(read, (int, float)) and "number" in allowed:
            return f"{head}{flow(read)} (without quotes)"
        if near := difflib.get_close_matches(value.lower().replace("-", "_"), choices(schema), n=1, cutoff=0.5):
            return f"{head}{near[0]}"
    items = schema.get("items") or next((o["items"] for o in schema.get("anyOf", []) if "items" in o), None)
    if items is not None:
        if isinstance(value, str) and "array" in allowed and items.get("type") == "string":
            return f"{head}[{', '.join(w for w in value.replace(',', ' ').split())}]"
        if isinstance(value, str) and items.get("type") == "object":
            return f"{head}[{{path: {value}}}]"
        if isinstance(value, dict) and items.get("type") == "object":
            return "put '- ' before the first key of the entry, and indent the others by two spaces more"
        if value == []:
            return f"add {example(name, schema)}"
    if isinstance(value, str) and schema.get("type") == "object" and "path" in schema.get("properties", {}):
        return f"{head}path: {value}"
    if isinstance(value, bool) and "string" in allowed and not choices(schema):
        return f'{head}"{str(value).lower()}"'
    if isinstance(value, float) and value.is_integer() and "integer" in allowed:
        return f"{head}{int(value)}"
    return ""
