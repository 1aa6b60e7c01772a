"""The graph: typed values in single-assignment form, in the order in which they are computed.

A :class:`Graph` is built by tracing a model (``surogate.dsl``), extended by autodiff and rewritten by the passes in
``surogate.compile``. It can be printed in a form that people read and tests compare, and verified after every pass.

State (gradient accumulators, optimizer moments, parameters that are updated) stays single-assignment: an op that
changes state returns a *new* value that takes the storage of the old one (``Op.inplace``). :meth:`Graph.verify` holds
that nothing reads an old version after a new one was written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

DType = Literal["f32", "f64", "bf16", "i32", "i64", "u8"]
DTYPE_BYTES: dict[str, int] = {"f32": 4, "f64": 8, "bf16": 2, "i32": 4, "i64": 8, "u8": 1}
Attr = bool | int | float | str | tuple[int, ...]


class GraphError(Exception):
    """A graph that breaks a rule: a fault of this program or of a model's author, never of a user's data."""


@dataclass(frozen=True, slots=True)
class Type:
    """Shape (static, row-major) and storage dtype of a value."""

    shape: tuple[int, ...]
    dtype: str = "f32"

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this type."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


ValueKind = Literal["temp", "input", "const", "param", "state"]


class Value:
    """One tensor. ``kind`` says where it comes from.

    ``temp``: computed by ``producer``. ``input``: written by the host before the program runs (tokens, scalars).
    ``const``: numbers fixed when the model was traced (``Graph.constants``). ``param``: a weight of the model, named as
    Hugging Face names it. ``state``: memory that lives from step to step (gradients, moments).
    """

    __slots__ = ("id", "type", "name", "kind", "producer", "index", "trainable")

    def __init__(self, id: int, type: Type, name: str, kind: ValueKind) -> None:
        self.id, self.type, self.name, self.kind = id, type, name, kind
        self.producer: Node | None = None
        self.index = 0  # which output of the producer
        self.trainable = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def __str__(self) -> str:
        return f"%{self.id}" if self.kind == "temp" else f"@{self.name}"

    def __repr__(self) -> str:
        return f"<{self} {self.type}>"


class Node:
    """One op applied to values. Optional operands and results that are left out are ``None``."""

    __slots__ = ("op", "inputs", "attrs", "outputs", "scope", "block", "phase")

    def __init__(self, op: str, inputs: list[Value | None], attrs: dict[str, Any], scope: str, block: int, phase: str):
        self.op, self.inputs, self.attrs = op, inputs, attrs
        self.outputs: list[Value | None] = []
        self.scope, self.block, self.phase = scope, block, phase

    def format(self) -> str:
        outs = ", ".join("_" if o is None else f"{o}: {o.type}" for o in self.outputs)
        args = ", ".join("_" if i is None else str(i) for i in self.inputs)
        attrs = "".join(f" {k}={v}" for k, v in sorted(self.attrs.items()))
        place = f"  # {self.scope}" if self.scope else ""
        return f"{outs} = {self.op}({args}){attrs}{place}"


class Graph:
    """Nodes in execution order, over inputs, parameters and state.

    ``outputs`` are temporaries that must survive; ``updates`` maps a state or parameter to the value that replaces it
    (same storage).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.sources: list[Value] = []  # inputs, params, states, in order of creation
        self.outputs: list[Value] = []
        self.updates: dict[Value, Value] = {}
        self.activation: str = "f32"  # dtype of activations; what embeds tokens says it, the rest takes it over
        self.constants: dict[str, np.ndarray] = {}
        self.initial: dict[str, str] = {}  # param name -> how it is initialised: normal, ones, zeros, ...
        self.packed: dict[str, list[tuple[str, int, int]]] = {}  # packed param -> (name, first row, rows) of its parts
        self._next_id = 0
        self._by_name: dict[str, Value] = {}
        self._scope: list[str] = []
        self._block = -1
        self._phase = "forward"
        self._sink: list[Node] = self.nodes

    # -- building ---------------------------------------------------------------------------------------------------

    def source(self, name: str, type: Type, kind: ValueKind, *, trainable: bool = False) -> Value:
        """Declare an input, parameter or state. Names are unique in a graph."""
        if name in self._by_name:
            raise GraphError(f"{self.name}: two sources named {name}")
        value = Value(self._next_id, type, name, kind)
        value.trainable = trainable
        self._next_id += 1
        self.sources.append(value)
        self._by_name[name] = value
        return value

    def drop_source(self, value: Value) -> None:
        """Remove a source that nothing reads any more."""
        self.sources.remove(value)
        del self._by_name[value.name]

    def find(self, name: str) -> Value | None:
        """The source of that name, or None."""
        return self._by_name.get(name)

    def emit(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> list[Value | None]:
        """Append ``op`` and return its outputs. Types are inferred and checked by the op's shape rule."""
        from surogate.ops import get_op

        node = Node(op, list(inputs), attrs, ".".join(s for s in self._scope if s), self._block, self._phase)
        types = get_op(op).infer([None if i is None else i.type for i in inputs], attrs)
        for index, t in enumerate(types):
            node.outputs.append(None if t is None else self.temp(t, node, index))
        self._sink.append(node)
        return node.outputs

    def one(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> Value:
        """:meth:`emit` for ops whose first output is the one that is wanted."""
        value = self.emit(op, inputs, **attrs)[0]
        assert value is not None
        return value

    def temp(self, type: Type, producer: Node, index: int) -> Value:
        """A fresh temporary; passes that build nodes by hand use it."""
        value = Value(self._next_id, type, "", "temp")
        self._next_id += 1
        value.producer, value.index = producer, index
        return value

    @contextlib.contextmanager
    def at(
        self,
        *,
        scope: str | None = None,
        block: int | None = None,
        phase: str | None = None,
        into: list[Node] | None = None,
    ) -> Iterator[None]:
        """Within the context, emitted nodes carry this scope, block and phase, and are appended to ``into``."""
        saved = (list(self._scope), self._block, self._phase, self._sink)
        if scope is not None:
            self._scope = [scope]
        if block is not None:
            self._block = block
        if phase is not None:
            self._phase = phase
        if into is not None:
            self._sink = into
        try:
            yield
        finally:
            self._scope, self._block, self._phase, self._sink = saved

    @property
    def scope(self) -> str:
        return ".".join(s for s in self._scope if s)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Push a component onto the scope (a module's attribute name)."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    # -- reading ----------------------------------------------------------------------------------------------------

    def uses(self) -> dict[Value, list[Node]]:
        """For each value the nodes that read it, in order, once for every operand."""
        table: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                if value is not None:
                    table.setdefault(value, []).append(node)
        return table

    @property
    def params(self) -> list[Value]:
        return [s for s in self.sources if s.kind == "param"]

    def format(self) -> str:
        """The whole graph as text: sources, nodes, outputs."""
        lines = [f"graph {self.name} {{"]
        lines += [f"  @{s.name}: {s.type} {s.kind}{' trainable' if s.trainable else ''}" for s in self.sources]
        lines += [f"  {n.format()}" for n in self.nodes]
        lines += [f"  return {', '.join(map(str, self.outputs))}"] if self.outputs else []
        lines += [f"  update {old} <- {new}" for old, new in self.updates.items()]
        return "\n".join([*lines, "}"])

    # -- rewriting --------------------------------------------------------------------------------------------------

    def replace(self, mapping: dict[Value, Value]) -> None:
        """Replace values wherever they are read, returned or stored. Chains are followed."""

        def last(value: Value) -> Value:
            while value in mapping:
                value = mapping[value]
            return value

        for node in self.nodes:
            node.inputs = [None if i is None else last(i) for i in node.inputs]
        self.outputs = [last(o) for o in self.outputs]
        self.updates = {old: last(new) for old, new in self.updates.items()}

    def prune(self) -> int:
        """Drop nodes whose results nobody reads; returns how many. Unread optional results stay."""
        live = {v for v in self.outputs} | set(self.updates.values())
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(o is not None and o in live for o in node.outputs):
                live.update(i for i in node.inputs if i is not None)
                kept.append(node)
        dropped = len(self.nodes) - len(kept)
        self.nodes[:] = kept[::-1]
        return dropped

    # -- checking ---------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Hold the graph's rules; raises :class:`GraphError` naming the node that breaks one.

        Every operand is defined before it is read; types are what the op's shape rule says; an in-place result has the
        type of the operand whose storage it takes; after it, that operand is not read again; outputs exist.
        """
        from surogate.ops import get_op

        defined = set(self.sources)
        overwritten: dict[Value, Node] = {}
        for node in self.nodes:
            op = get_op(node.op)
            for i in node.inputs:
                if i is None:
                    continue
                if i not in defined:
                    raise GraphError(f"{self.name}: {node.format()} reads {i} before it is defined")
                if i in overwritten:
                    writer = overwritten[i].format()
                    raise GraphError(f"{self.name}: {node.format()} reads {i}, overwritten by {writer}")
            types = op.infer([None if i is None else i.type for i in node.inputs], node.attrs)
            found = [None if o is None else o.type for o in node.outputs]
            if types != found:
                raise GraphError(f"{self.name}: {node.format()} should give {types}")
            for out, src in op.inplace.items():
                o, i = node.outputs[out] if out < len(node.outputs) else None, None
                i = node.inputs[src] if src < len(node.inputs) else None
                if o is not None and i is not None:
                    if o.type != i.type:
                        raise GraphError(f"{self.name}: {node.format()}: result {out} takes storage of another type")
                    overwritten[i] = node
            for o in node.outputs:
                if o is not None:
                    defined.add(o)
        for value in [*self.outputs, *self.updates.values()]:
            if value not in defined:
                raise GraphError(f"{self.name}: output {value} is never computed")
            if value in overwritten:
                raise GraphError(f"{self.name}: output {value} is overwritten by {overwritten[value].format()}")
