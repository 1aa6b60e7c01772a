"""YAML text to a plain tree, with the place of everything in it.

Scalars follow YAML 1.2's core schema rather than PyYAML's 1.1: ``2e-4`` is a number, ``010`` is ten, ``no`` and
``12:30`` are text. (Where a key is a truth value the loader still takes ``yes``/``no``/``on``/``off``.) Refused:
duplicate keys, tags, more than one document, anchors that contain themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from surogate.config import pasted
from surogate.errors import UserError

_INT = re.compile(r"[-+]?[0-9]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_ENV = re.compile(r"\$(\$\{)|\$\{([^}]*)\}")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_GLUED = re.compile(r"^(\s*(?:- )?)([A-Za-z_]\w*):([^\s:/\\].*)$")
_MOST_NODES = 100_000  # a config has some dozens; aliases of aliases could make a few lines explode


@dataclass
class Tree:
    """Plain values, and for every path (``datasets.0.path``) its place and, for bare scalars, its text.

    ``keys`` are the places of keys, ``values`` of values, as ``(line, column)`` from 1.
    """

    value: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, tuple[int, int]] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)


def join(path: str, key: object) -> str:
    """Return the path of ``key`` below ``path``."""
    return f"{path}.{key}" if path else str(key)


def scalar(text: str) -> Any:
    """Return the value of a bare scalar by YAML 1.2's core schema: None, bool, int, float or str."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text):
        return int(text) if len(text) < 1000 else text  # Python refuses to read longer ones
    if _HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if infinite := _INF.fullmatch(text):
        return float(infinite[1] + "inf")
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


def expand(text: str, environment: Mapping[str, str], where: str) -> str:
    """Replace ``${NAME}`` and ``${NAME:-default}``; ``$${`` stands for ``${`` itself.

    Raises:
        UserError: a name that is not set (and has no default), or no name at all.
    """

    def one(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        name = _NAME.fullmatch(match[2])
        if name is None:
            raise UserError(
                f"'{match[0]}' names no environment variable",
                where=where,
                expected="${NAME} or ${NAME:-default}",
                fix="write $${ if the text itself is meant",
            )
        value = environment.get(name[1], name[2])
        if value is None:
            raise UserError(
                f"the environment variable {name[1]} is not set",
                where=where,
                fix=f"set it (export {name[1]}=...), or give a default: ${{{name[1]}:-default}}",
            )
        return value

    return _ENV.sub(one, text)


def pasted_errors(text: str, source: str) -> list[UserError]:
    """Return one error a line for characters that came with pasting, tabs among them; see :mod:`.pasted`."""
    errors = []
    for p in pasted.find(text):
        good = (
            "spaces: YAML does not take tabs" if p.character == "\t" else f"plain {p.ascii!r}" if p.ascii else "nothing"
        )
        meant = "" if p.character == "\t" else " (a value that is meant to hold it goes in straight quotes)"
        errors.append(
            UserError(
                f"{p.name}\n{pasted.excerpt(p.line, p.column, p.text)}",
                where=f"{source}:{p.line}:{p.column}",
                expected=good + meant,
                fix=f"write this line as\n      {p.mended}",
            )
        )
    return errors


def parse(text: str, source: str, environment: Mapping[str, str] | None = None) -> Tree:
    """Read one YAML mapping.

    Args:
        text: the YAML text.
        source: its name in messages, a path as the user gave it.
        environment: for ``${NAME}``; default: the process's.

    Raises:
        UserError: anything that is no single mapping with unique keys, at ``source:line:column``.
    """
    lines = text.split("\n")
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise _syntax(error, source, lines) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        raise UserError(
            f"a character that YAML does not allow (U+{ord(text[error.position]):04X})",
            where=f"{source}:{line}:{column}",
            fix="delete it",
        ) from None
    if root is None:
        raise UserError("the file is empty", where=source, expected="lines such as model: Qwen/Qwen3-0.6B")
    if not isinstance(root, yaml.MappingNode):
        glued = _glued(lines, source)
        raise glued or UserError(
            f"found {'a list' if isinstance(root, yaml.SequenceNode) else 'text'} where the configuration should be",
            where=f"{source}:{root.start_mark.line + 1}:{root.start_mark.column + 1}",
            expected="key: value, one a line",
        )
    return _Builder(source, lines, os.environ if environment is None else environment).build(root)


def _glued(lines: list[str], source: str) -> UserError | None:
    """``key:value`` without a space is one word to YAML; find the first line like that."""
    for number, line in enumerate(lines, start=1):
        if match := _GLUED.match(line):
            column = match.end(2) + 2
            return UserError(
                f"no space after the colon\n{pasted.excerpt(number, column, line)}",
                where=f"{source}:{number}:{column}",
                fix=f"write this line as\n      {match[1]}{match[2]}: {match[3]}",
            )
    return None


def _syntax(error: yaml.MarkedYAMLError, source: str, lines: list[str]) -> UserError:
    if glued := _glued(lines, source):
        return glued
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "this is not YAML"
    if mark is None:
        return UserError(problem, where=source)
    line, column = mark.line + 1, mark.column + 1
    shown = lines[mark.line] if mark.line < len(lines) else ""
    what, fix = problem, ""
    if "mapping values are not allowed" in problem:
        what = "a second 'key:' where none can be: wrong indentation, or a colon within a value"
        fix = "indent all keys of one level alike; put a value that has a colon in quotes"
    elif "did not find expected" in problem or "expected <block end>" in problem:
        what, fix = "this line is not indented like those around it", "indent all keys of one level alike"
    elif "another document" in problem:
        what, fix = "a second document", "one file holds one configuration: delete the line '---' and what follows"
    elif "expected ',' or" in problem:
        what, fix = problem.replace("but got", "found"), "close the bracket that was opened before"
    elif "while scanning a quoted scalar" in (error.context or "") and error.context_mark:
        line, column = error.context_mark.line + 1, error.context_mark.column + 1
        shown, what, fix = lines[line - 1], "a quote that is never closed", "add the closing quote"
    elif "could not find expected ':'" in problem and error.context_mark:
        line, column = error.context_mark.line + 1, error.context_mark.column + 1
        shown, what, fix = lines[line - 1], "no colon after the key", "write key: value"
    return UserError(f"{what}\n{pasted.excerpt(line, column, shown)}", where=f"{source}:{line}:{column}", fix=fix)


class _Builder:
    def __init__(self, source: str, lines: list[str], environment: Mapping[str, str]) -> None:
        self.source, self.lines, self.environment = source, lines, environment
        self.tree = Tree()
        self.nodes = 0
        self.open: set[int] = set()  # nodes that are being built, to find anchors that contain themselves

    def build(self, root: yaml.MappingNode) -> Tree:
        self.tree.value = self._value(root, "")
        return self.tree

    def _where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _value(self, node: yaml.Node, path: str) -> Any:
        self.nodes += 1
        if self.nodes > _MOST_NODES or id(node) in self.open:
            raise UserError("aliases that contain one another", where=self._where(node), fix="write the values out")
        self.tree.values[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            raise UserError(f"the tag {node.tag}", where=self._where(node), expected="plain values", fix="delete it")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self.open.add(id(node))
        result: Any
        if isinstance(node, yaml.SequenceNode):
            result = [self._value(item, join(path, i)) for i, item in enumerate(node.value)]
        else:
            assert isinstance(node, yaml.MappingNode)
            result = self._mapping(node, path)
        self.open.discard(id(node))
        return result

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError("a key that is no word", where=self._where(key_node), expected="key: value")
            key = key_node.value
            where = join(path, key)
            if key in result:
                line = self.tree.keys[where][0]
                raise UserError(
                    f"the key '{key}' is given twice; the first is in line {line}",
                    where=self._where(key_node),
                    fix="leave one of them out",
                )
            self.tree.keys[where] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            result[key] = self._value(value_node, where)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        text: str = node.value
        if "${" in text:
            text = expand(text, self.environment, self._where(node))
        if node.style is not None:  # quoted or block: text, whatever it looks like
            return text
        self.tree.bare[path] = text
        return scalar(text)
