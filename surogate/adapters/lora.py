"""LoRA (Hu et al. 2021): y = x W^T + s * dropout(x) A^T B^T, with A [rank, in] and B [out, rank] trained.

The scale s is alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (Kalajdzievski 2023). B starts at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from surogate.errors import UserError
from surogate.graph import Graph, Node, Type, Value


@dataclass(frozen=True)
class LoraOptions:
    """``targets``: names of linear layers as PEFT matches them (the last parts of the path), or ``("all-linear",)``."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rslora: bool = False
    targets: tuple[str, ...] = ("all-linear",)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass
class LoraResult:
    """``modules``: adapted paths, in order of execution. ``names``: the distinct last parts of their paths."""

    modules: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return sorted({m.rsplit(".", 1)[-1] for m in self.modules})


def linear_of(node: Node) -> str | None:
    """The module path of a matmul with a weight of the model, else None."""
    weight = node.inputs[1] if node.op == "matmul" else None
    if weight is None or weight.kind != "param" or not weight.name.endswith(".weight"):
        return None
    return weight.name.removesuffix(".weight")


def matches(path: str, targets: Sequence[str]) -> bool:
    """Whether PEFT's rule selects this module: the whole path or its last parts equal a target."""
    return "all-linear" in targets or any(path == t or path.endswith("." + t) for t in targets)


def apply(g: Graph, options: LoraOptions, *, training: bool) -> LoraResult:
    """Add adapters to a traced forward graph.

    Args:
        g: forward graph; changed in place.
        options: rank, scale and targets.
        training: apply dropout (evaluation does not).

    Raises:
        UserError: a target that no linear layer has; the message lists those that exist.
    """
    linears = [p for p in map(linear_of, g.nodes) if p is not None]
    _check_targets(linears, options.targets)
    result = LoraResult()
    mapping: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in list(g.nodes):
        node.inputs = [None if i is None else mapping.get(i, i) for i in node.inputs]
        nodes.append(node)
        path = linear_of(node)
        if path is None or not matches(path, options.targets):
            continue
        with g.at(scope=path, block=node.block, into=nodes):
            mapping[_output(node)] = _adapt(g, node, path, options, training, salt=len(result.modules))
        result.modules.append(path)
    g.nodes[:] = nodes
    g.outputs = [mapping.get(o, o) for o in g.outputs]
    g.verify()
    return result


def _output(node: Node) -> Value:
    value = node.outputs[0]
    assert value is not None
    return value


def _adapt(g: Graph, node: Node, path: str, o: LoraOptions, training: bool, salt: int) -> Value:
    x, weight = node.inputs[0], node.inputs[1]
    assert x is not None and weight is not None
    outputs, inputs = weight.shape
    a = g.source(f"{path}.lora_A.weight", Type((o.rank, inputs)), "param", trainable=True)
    b = g.source(f"{path}.lora_B.weight", Type((outputs, o.rank)), "param", trainable=True)
    g.initial[a.name], g.initial[b.name] = "lora_a", "zeros"
    if training and o.dropout > 0:
        seed = g.find("seed") or g.source("seed", Type((1,), "i64"), "input")
        x = g.one("dropout", [x, seed], p=float(o.dropout), salt=salt)
    u = g.one("matmul", [x, a, None, None], ta=False, tb=True, alpha=1.0)
    return g.one("matmul", [u, b, None, _output(node)], ta=False, tb=True, alpha=o.scale)


def _check_targets(linears: list[str], targets: Sequence[str]) -> None:
    existing = sorted({p.rsplit(".", 1)[-1] for p in linears})
    for target in targets:
        if target == "all-linear" or any(matches(p, [target]) for p in linears):
            continue
        found = f"no linear layer is named '{target}'"
        if target.rsplit(".", 1)[-1] == "lm_head":
            found = f"'{target}' is the output head, which takes no adapter"
        raise UserError(
            found,
            where="lora_target_modules",
            expected=f"all-linear, or some of {', '.join(existing)}",
        )
