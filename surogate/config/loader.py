"""A YAML file and ``key=value`` overrides to a :class:`TrainConfig`, or to errors that say where and how to mend.

All errors of a file are reported at once, in the order of its lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from surogate.config import pasted, yaml_tree
from surogate.config.messages import choices, describe, example, fix_for, fragment, kinds, show, unknown_key
from surogate.config.schema import TrainConfig
from surogate.config.yaml_tree import join
from surogate.errors import UserError

_MOST_ERRORS = 10  # more than that is one mistake, made often


class ConfigErrors(UserError):
    """All errors of one configuration; ``errors`` has them one by one, in the order of the file."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = list(errors)
        first = self.errors[0]
        super().__init__(first.what, where=first.where, expected=first.expected, fix=first.fix)

    def render(self) -> str:
        """Return all messages, one below the other."""
        shown = [error.render() for error in self.errors[:_MOST_ERRORS]]
        more = len(self.errors) - _MOST_ERRORS
        return "\n".join(shown + ([f"(and {more} more of that kind)"] if more > 0 else []))


@dataclass(frozen=True)
class Provenance:
    """Where each key was given. Never a reason for two configurations to differ.

    Attributes:
        source: the file as it was named; empty for a configuration made in Python.
        places: path of a key (``datasets.0.path``) to ``file:line:column`` or ``command line: key=value``.
        overrides: the overrides, as they were given.
    """

    source: str = field(default="", compare=False)
    places: Mapping[str, str] = field(default_factory=dict, compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)

    def where(self, key: str) -> str:
        """Return the place of ``key``, else that of the nearest key above it, else ``file: key``."""
        path = key
        while path:
            if path in self.places:
                return self.places[path]
            path = path.rpartition(".")[0]
        return f"{self.source}: {key}" if self.source else key


def load_config(
    path: str, overrides: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> tuple[TrainConfig, Provenance]:
    """Read ``path``, apply ``overrides``, check everything.

    Relative paths *in* the file (``output_dir``, data sets, model) are meant from the current directory, and are
    left as they are.

    Args:
        path: a YAML file in UTF-8.
        overrides: ``key=value``; a key may be a path (``datasets.0.path=x.jsonl``), a value is YAML.
        environment: for ``${NAME}`` in values; default: the process's.

    Raises:
        UserError: the file cannot be read; :class:`ConfigErrors` for what is wrong in it.
    """
    text = _read(path)
    if bad := yaml_tree.pasted_errors(text, path):
        raise ConfigErrors(bad)
    environment = os.environ if environment is None else environment
    tree = yaml_tree.parse(text, path, environment)
    places = {p: f"{path}:{line}:{column}" for p, (line, column) in tree.values.items() if p}
    key_places = {p: f"{path}:{line}:{column}" for p, (line, column) in tree.keys.items()}
    for override in overrides:
        _override(override, tree, places, key_places, environment)
    return _build(tree.value, tree.bare, places, key_places, path, tuple(overrides))


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """Check a configuration given in Python, with the same messages as a file's.

    Raises:
        ConfigErrors: what is wrong, with keys for places.
    """
    return _build(dict(values), {}, {}, {}, "", ())[0]


class _Dumper(yaml.SafeDumper):
    """Quotes text that :mod:`.pasted` would take for a slip."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "'" if any(pasted.mend(c) is not None for c in value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def resolved_yaml(config: TrainConfig, mode: str = "sft") -> str:
    """Return ``config`` with every default written out, as YAML that :func:`load_config` reads back unchanged.

    Keys that would do nothing are left out, since :mod:`surogate.config.checks` refuses them.
    """
    values = config.model_dump(mode="json")
    for name in ("datasets", "validation_datasets"):
        values[name] = [{k: v for k, v in source.items() if v is not None} for source in values[name]]
    if config.lr_scheduler_type != "wsd":
        del values["wsd_decay_ratio"]
    if config.recipe == "fp32":
        del values["master_weights"]
    if mode == "pt":
        values["train_on"] = "all"
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text.replace("${", "$${")  # what was expanded is text by now


def check_mode(config: TrainConfig, mode: str) -> None:
    """Check what depends on the command: ``mode`` is ``sft`` or ``pt``.

    Raises:
        UserError: a key that the command cannot follow.
    """
    if mode == "sft" and config.from_scratch:
        raise UserError(
            "fine-tuning starts from trained weights",
            where=config.where("from_scratch"),
            expected="from_scratch: false for surogate sft",
            fix="use surogate pt, or leave from_scratch out",
        )
    if mode == "pt" and "train_on" in config.model_fields_set and config.train_on != "all":
        raise UserError(
            f"pre-training trains on all tokens, not on '{config.train_on}'",
            where=config.where("train_on"),
            expected="train_on: all for surogate pt",
            fix="use surogate sft, or leave train_on out",
        )


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        raise UserError(
            "no such file", where=path, expected="a YAML file with the configuration", fix="check the path"
        ) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path) from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from None


# --- overrides ------------------------------------------------------------------------------------------------------


def _override(
    text: str,
    tree: yaml_tree.Tree,
    places: dict[str, str],
    key_places: dict[str, str],
    environment: Mapping[str, str],
) -> None:
    """Write one ``key=value`` into ``tree``, and its place into both tables."""
    where = f"command line: {text}"
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(
            "an override without '='", where=where, expected="key=value, such as learning_rate=1e-4", fix="add '='"
        )
    raw = raw.strip()
    if raw[:1] in tuple("[{\"'“‘"):
        if bad := yaml_tree.pasted_errors(raw, "command line"):
            raise ConfigErrors(bad)
        below = yaml_tree.parse(f"value: {raw}", where, environment)
        value = below.value["value"]
        bare = {key + path.removeprefix("value"): text for path, text in below.bare.items()}
    else:
        raw = yaml_tree.expand(raw, environment, where)
        value, bare = yaml_tree.scalar(raw), {key: raw}
    parent: Any = tree.value
    parts = key.split(".")
    for i, part in enumerate(parts[:-1]):
        parent = _step(parent, part, ".".join(parts[: i + 1]), where, parts[i + 1])
    last = parts[-1]
    if isinstance(parent, list):
        index = _index(parent, last, key, where)
        if index == len(parent):
            parent.append(value)
        else:
            parent[index] = value
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise UserError(f"'{key}' goes into something that is no list and no mapping", where=where)
    for table in (places, key_places, tree.bare):
        for old in [p for p in table if p == key or p.startswith(key + ".")]:
            del table[old]
    places[key] = key_places[key] = where
    tree.bare.update(bare)


def _step(parent: Any, part: str, path: str, where: str, following: str) -> Any:
    """Go one part down, and make what is missing."""
    new: Any = [] if following.isdigit() else {}
    if isinstance(parent, dict):
        if parent.get(part) is None:
            parent[part] = new
        return parent[part]
    if isinstance(parent, list):
        index = _index(parent, part, path, where)
        if index == len(parent):
            parent.append(new)
        return parent[index]
    raise UserError(f"'{path}' goes into something that is no list and no mapping", where=where)


def _index(items: list[Any], part: str, path: str, where: str) -> int:
    if part.isdigit() and int(part) <= len(items):
        return int(part)
    raise UserError(
        f"'{path}' is no place in a list of {len(items)}",
        where=where,
        expected=f"a number from 0 to {len(items)} ({len(items)} adds one at the end)",
    )


# --- values to a checked configuration ------------------------------------------------------------------------------


def _build(
    values: dict[str, Any],
    bare: Mapping[str, str],
    places: Mapping[str, str],
    key_places: Mapping[str, str],
    source: str,
    overrides: tuple[str, ...],
) -> tuple[TrainConfig, Provenance]:
    provenance = Provenance(source, dict(places), overrides)
    errors: list[tuple[str, UserError]] = []  # path, error

    def where_key(path: str) -> str:
        return key_places.get(path) or provenance.where(path)

    known = _known(values, "", bare, where_key, errors)
    try:
        config = TrainConfig.model_validate(known)
    except ValidationError as error:
        for path, found in _validation(error, known, provenance).items():
            errors.append((path, found))
    except UserError as error:  # from checks.py; its place is the key
        key = error.where
        placed = UserError(error.what, where=provenance.where(key), expected=error.expected, fix=error.fix)
        errors.append((key, placed))
    if errors:
        order = {path: i for i, path in enumerate(key_places)}
        errors.sort(key=lambda e: order.get(e[0], len(order)))
        raise ConfigErrors([error for _, error in errors])
    config._provenance = provenance
    return config, provenance


def _known(value: Any, path: str, bare: Mapping[str, str], where_key: Any, errors: list[tuple[str, UserError]]) -> Any:
    """Return ``value`` without unknown keys (they go to ``errors``), its bare scalars read as their keys want them."""
    schema = fragment(path) or {}
    if isinstance(value, dict) and "properties" in schema:
        result = {}
        for key, below in value.items():
            here = join(path, key)
            if key in schema["properties"]:
                result[key] = _known(below, here, bare, where_key, errors)
            else:
                errors.append((here, unknown_key(key, below, bare.get(here), path, where_key(here))))
        return result
    if isinstance(value, (list, tuple)):
        return [_known(item, join(path, i), bare, where_key, errors) for i, item in enumerate(value)]
    if isinstance(value, dict):  # a mapping with names of the user's own
        return {key: _known(below, join(path, key), bare, where_key, errors) for key, below in value.items()}
    text = bare.get(path)
    if text is None:
        return value
    if not schema and text.lower() in ("yes", "no", "on", "off"):
        meant = "true" if text.lower() in ("yes", "on") else "false"
        error = UserError(
            f"{path.rpartition('.')[2]} is {text}, which is a truth value to some and text to others",
            where=where_key(path),
            fix=f'write {meant}, or "{text}" if the word is meant',
        )
        errors.append((path, error))
    allowed = kinds(schema)
    if "boolean" in allowed and text.lower() in ("yes", "on", "no", "off"):
        return text.lower() in ("yes", "on")
    natural = {bool: "boolean", int: "integer", float: "number"}.get(type(value))
    if "string" in allowed and natural and natural not in allowed and not choices(schema):
        return text  # a name that looks like a number: 007 stays 007
    return value


def _validation(error: ValidationError, values: dict[str, Any], provenance: Provenance) -> dict[str, UserError]:
    """Turn pydantic's errors into ours, one for each key."""
    result: dict[str, UserError] = {}
    for detail in error.errors(include_url=False):
        path, value, missing = _locate(detail["loc"], values)
        if path in result:
            continue
        schema = fragment(path) or {}
        name = path.rpartition(".")[2]
        if missing:
            above = path.rpartition(".")[0]
            result[path] = UserError(
                f"the key '{name}' is missing",
                where=provenance.where(above) if above else provenance.source,
                expected=describe(schema),
                fix=f"add {example(name, schema)}",
            )
            continue
        label = name if not name.isdigit() else path
        expected = describe(schema)
        result[path] = UserError(
            f"{label} is {show(value)}",
            where=provenance.where(path),
            expected=expected,
            fix=fix_for(path, value, schema),
        )
    # A list whose only item is wrong is "too short" to pydantic as well: keep the inner error alone.
    return {p: e for p, e in result.items() if not any(other.startswith(p + ".") for other in result)}


def _locate(loc: tuple[int | str, ...], values: Any) -> tuple[str, Any, bool]:
    """Follow pydantic's location as far as it is one of ours (it names branches of unions too).

    Returns the path, the value there, and whether the last key is missing.
    """
    path, value = "", values
    for part in loc:
        if isinstance(part, int) and isinstance(value, (list, tuple)) and part < len(value):
            value = value[part]
        elif isinstance(part, str) and isinstance(value, dict) and fragment(join(path, part)) is not None:
            if part not in value:
                return join(path, part), None, True
            value = value[part]
        else:
            continue  # the name of a union's branch
        path = join(path, part)
    return path, value, False
