"""Modules and parameters: the tree whose attribute names are the Hugging Face weight names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from surogate.dsl.tensor import Tensor
from surogate.graph import Graph, GraphError, Node, Type, Value


class Param:
    """A weight. ``init`` says how pre-training from scratch fills it: ``normal`` (the config's initializer_range),
    ``ones`` or ``zeros``."""

    def __init__(self, *shape: int, init: str = "normal") -> None:
        self.shape, self.init = shape, init
        self.path = ""


class Module:
    """Base class. Subclasses set parameters and modules as attributes and define ``forward``."""

    path: str = ""

    def children(self) -> Iterator[tuple[str, Param | Module]]:
        """Parameters and modules in the order in which they were set."""
        for name, item in vars(self).items():
            if isinstance(item, (Param, Module)):
                yield name, item

    def bind(self, path: str = "") -> None:
        """Give this module and all below it their full names."""
        self.path = path
        for name, item in self.children():
            full = f"{path}.{name}" if path else name
            if isinstance(item, Module):
                item.bind(full)
            else:
                item.path = full

    def weight(self, graph: Graph, param: Param) -> Tensor:
        """The parameter as a tensor of the graph that is being traced; the same one each time."""
        value = graph.find(param.path)
        if value is None:
            value = graph.source(param.path, Type(param.shape), "param")
            graph.initial[param.path] = param.init
        return Tensor(graph, value)

    def forward(self, *args: Any) -> Tensor:
        """The mathematics of the module. Subclasses name their arguments."""
        raise NotImplementedError

    def __call__(self, *args: Any) -> Tensor:
        graph = next(a.graph for a in args if isinstance(a, Tensor))
        with graph.at(scope=self.path):
            return self.forward(*args)


class Linear(Module):
    """y = x @ weight.T + bias; weight [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.weight_param = Param(outputs, inputs)
        self.bias_param = Param(outputs, init="zeros") if bias else None

    def bind(self, path: str = "") -> None:
        self.path = path
        self.weight_param.path = f"{path}.weight"
        if self.bias_param is not None:
            self.bias_param.path = f"{path}.bias"

    def forward(self, x: Tensor) -> Tensor:
        g = x.graph
        bias = None if self.bias_param is None else self.weight(g, self.bias_param).value
        w = self.weight(g, self.weight_param).value
        return Tensor(g, g.one("matmul", [x.value, w, bias, None], ta=False, tb=True, alpha=1.0))


class Embedding(Module):
    """Rows of a table by token id; weight [vocabulary, hidden]."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        self.table = Param(vocabulary, hidden)

    def bind(self, path: str = "") -> None:
        self.path = path
        self.table.path = f"{path}.weight"

    def forward(self, ids: Tensor) -> Tensor:
        g = ids.graph
        told = {} if g.activation == "f32" else {"dtype": g.activation}
        return Tensor(g, g.one("embedding", [self.weight(g, self.table).value, ids.value], **told))


class RMSNorm(Module):
    """w * x / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale, self.eps = Param(size, init="ones"), eps

    def bind(self, path: str = "") -> None:
        self.path = path
        self.scale.path = f"{path}.weight"

    def forward(self, x: Tensor) -> Tensor:
        g = x.graph
        return Tensor(g, g.one("rmsnorm", [x.value, self.weight(g, self.scale).value], eps=float(self.eps)))


class Layers(Module):
    """A stack of blocks, each ``block(x, *context) -> x``.

    A block object may stand in the list many times: it is traced once, and its nodes are stamped for every further
    place with that place's own parameters. So tracing costs the number of block types, not of layers.
    """

    def __init__(self, blocks: Sequence[Module]) -> None:
        self.blocks = list(blocks)

    def bind(self, path: str = "") -> None:
        self.path = path
        for index in range(len(self.blocks) - 1, -1, -1):  # a shared block keeps the name of its first place
            self.blocks[index].bind(f"{path}.{index}")

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        g = x.graph
        traced: dict[int, tuple[int, Value, list[Node], Value]] = {}
        for index, block in enumerate(self.blocks):
            with g.at(block=index):
                known = traced.get(id(block))
                if known is None:
                    start = len(g.nodes)
                    y = block(x, *context)
                    if y.value.kind != "temp" or y.shape != x.shape:
                        raise GraphError(f"{block.path}: a block must return a new tensor of its input's shape")
                    traced[id(block)] = (index, x.value, g.nodes[start:], y.value)
                    x = y
                else:
                    x = Tensor(g, self._stamp(g, known, index, x.value))
        return x

    def _stamp(self, g: Graph, known: tuple[int, Value, list[Node], Value], index: int, x: Value) -> Value:
        """Copy a traced block for place ``index`` with input ``x``; returns its output."""
        first, x0, nodes, y0 = known
        old, new = f"{self.path}.{first}", f"{self.path}.{index}"
        mapping: dict[Value, Value] = {x0: x}

        def moved(value: Value | None) -> Value | None:
            if value is None or value in mapping:
                return None if value is None else mapping[value]
            if value.kind == "param" and value.name.startswith(old + "."):
                name = new + value.name[len(old) :]
                source = g.find(name) or g.source(name, value.type, "param")
                g.initial[name] = g.initial[value.name]
                mapping[value] = source
                return source
            return value

        for node in nodes:
            scope = new + node.scope[len(old) :] if node.scope.startswith(old) else node.scope
            copy = Node(node.op, [moved(i) for i in node.inputs], dict(node.attrs), scope, index, node.phase)
            for out in node.outputs:
                fresh = None if out is None else g.temp(out.type, copy, out.index)
                copy.outputs.append(fresh)
                if out is not None and fresh is not None:
                    mapping[out] = fresh
            g.nodes.append(copy)
        return mapping[y0]
