"""Chat templates: one rendering of a conversation that also says which characters came from which message.

A chat template is Jinja. The text must equal what ``apply_chat_template`` of transformers makes of the same row, so the
environment is the same (sandbox, ``trim_blocks``, ``lstrip_blocks``, loop controls, ``tojson``, ``raise_exception``,
``strftime_now``). Besides, the template's syntax tree gets *marks*: empty strings of a class of our own, put out at the
head of every loop body and behind every loop. Compiled Jinja yields its output piece by piece, so a mark's place in
that stream is the exact character at which the rendering of a message begins. Marks are empty: they cannot change the
text, whatever the template does with it. Where a template collects output in a macro or a ``set`` block, marks are
lost in the collected string; the caller then sees no regions and takes another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surogate.errors import UserError

Span = tuple[int, int]
"""Half-open range of characters of the rendered text."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MARK = "__surogate_mark__"


class TemplateRefusal(Exception):
    """The template itself refused a conversation (``raise_exception``) or broke on it. The text says why."""


@dataclass(frozen=True)
class Rendering:
    """One rendered conversation.

    Attributes:
        text: exactly what the template makes of the messages.
        regions: for each message the characters put out while the template was at it, or ``None`` where that is
            unknown (the template collects its output) or not one range.
        generated: what the template put between ``{% generation %}`` and ``{% endgeneration %}``, in order.
        pieces: the text as the template put it out, one expression or stretch of plain text after the other.
    """

    text: str
    regions: list[Span | None]
    generated: list[Span] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)


class _Mark(str):
    """An empty string that remembers why it was put out; ``str()`` of it keeps the class."""

    kind: str
    loop: int
    value: Any

    def __str__(self) -> str:
        return self


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``: puts out its body between two marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope([_put("open", 0, None, line), *body, _put("close", 0, None, line)], lineno=line)


def _put(kind: str, loop: int, target: str | None, line: int) -> nodes.Output:
    # A filter, since the sandbox inspects every call of a function anew; of a variable, or else it would be computed
    # once for all.
    value = nodes.Name(target or "messages", "load")
    mark = nodes.Filter(value, _MARK, [nodes.Const(kind), nodes.Const(loop)], [], None, None)
    output = nodes.Output([mark])
    for node in (output, mark, *mark.iter_child_nodes()):
        node.lineno = line
    return output


def _instrument(tree: nodes.Node, counter: list[int]) -> None:
    """Add an ``item`` mark for each loop variable to the head of every loop body, an ``end`` mark behind the loop."""
    for name in tree.fields:
        children = getattr(tree, name)
        if not isinstance(children, list):
            if isinstance(children, nodes.Node):
                _instrument(children, counter)
            continue
        rebuilt: list[Any] = []
        for child in children:
            rebuilt.append(child)
            if not isinstance(child, nodes.Node):
                continue
            _instrument(child, counter)
            if isinstance(child, nodes.For):
                counter[0] += 1
                targets = [child.target] if isinstance(child.target, nodes.Name) else child.target.find_all(nodes.Name)
                heads = [_put("item", counter[0], target.name, child.lineno) for target in targets]
                child.body[:0] = heads
                rebuilt.append(_put("end", counter[0], None, child.lineno))
        setattr(tree, name, rebuilt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment(mark: Callable[[Any, str, int], _Mark]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters[_MARK] = mark
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        where: file or name, for messages.

    Raises:
        UserError: the text is no valid Jinja.
    """

    def __init__(self, source: str, where: str = "chat template") -> None:
        self.source, self.where = source, where
        self._index_of: dict[int, int] = {}  # of the messages that are being rendered, by identity
        environment = _environment(self._mark)
        try:
            tree = environment.parse(source)
            _instrument(tree, [0])
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"not a valid Jinja template: {error.message}", where=f"{where}:{error.lineno}") from None
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Rendering:
        """Render ``messages`` once.

        Args:
            messages: turns as the template sees them; keys whose value is ``None`` are left out, and reasoning is
                offered under each of its usual names, as transformers does.
            variables: everything else that the template sees (``tools``, ``bos_token``, ``add_generation_prompt`` ...).

        Raises:
            TemplateRefusal: the template raised an exception for this conversation.
        """
        shown = [_shown(message) for message in messages]
        self._index_of = {id(message): index for index, message in enumerate(shown)}
        context = self._template.new_context({**variables, "messages": shown})
        try:
            return _assemble(self._template.root_render_func(context), len(shown))
        except jinja2.TemplateError as error:
            raise TemplateRefusal(str(error.message or type(error).__name__)) from None
        except Exception as error:  # a template is foreign code and can raise anything
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from None

    def _mark(self, value: Any, kind: str, loop: int) -> _Mark:
        mark = _Mark("")
        mark.kind, mark.loop = kind, loop
        mark.value = self._index_of.get(id(value)) if kind == "item" else None
        return mark


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _assemble(stream: Iterator[str], count: int) -> Rendering:
    """Join the pieces of the text and give each stretch between two marks to the innermost message it belongs to."""
    pieces: list[str] = []
    runs: list[list[Span]] = [[] for _ in range(count)]
    generated: list[Span] = []
    opened: list[int] = []
    stack: list[tuple[int, int | None]] = []  # (loop, index of its message or None), outermost first
    position = since = 0

    def close_stretch() -> None:
        nonlocal since
        owner = next((index for _, index in reversed(stack) if index is not None), None)
        if owner is not None and position > since:
            own = runs[owner]
            if own and own[-1][1] == since:
                own[-1] = (own[-1][0], position)
            else:
                own.append((since, position))
        since = position

    for piece in stream:
        if type(piece) is not _Mark:
            pieces.append(piece)
            position += len(piece)
        elif piece.kind == "open":
            opened.append(position)
        elif piece.kind == "close":
            if opened:
                generated.append((opened.pop(), position))
        else:
            close_stretch()
            if stack and stack[-1][0] == piece.loop:
                # A loop with several variables marks each: keep the one that is a message.
                if piece.kind == "item" and piece.value is None:
                    continue
                stack.pop()
            if piece.kind == "item":
                stack.append((piece.loop, piece.value))
    regions = [own[0] if len(own) == 1 else None for own in runs]
    return Rendering("".join(pieces), regions, generated, pieces)
