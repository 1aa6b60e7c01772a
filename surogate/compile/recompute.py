"""Recomputation (Chen et al. 2016): values that the backward pass computes again instead of keeping them.

``selective`` drops the results of ops that cost no more than reading them back (norms, activations, dropout);
``block`` keeps only what passes between blocks. What an op says is never kept (weights that are made whole) is computed
again in front of each reader, also with ``off``. The same kernels run on the same numbers, so gradients stay the same
bit for bit.
"""

from __future__ import annotations

from typing import Literal

from surogate.graph import Graph, Node, Value
from surogate.ops import get_op

Mode = Literal["off", "selective", "block"]


def recompute(g: Graph, mode: Mode) -> int:
    """Rewrite the backward pass to recompute forward values; returns the number of nodes added."""
    if mode == "off" and not any(get_op(n.op).transient for n in g.nodes):
        return 0
    kept = _kept(g, mode)
    nodes: list[Node] = []
    clones: dict[Value, Value] = {}
    for node in g.nodes:
        if node.phase == "backward":
            node.inputs = [None if i is None else _again(g, i, kept, clones, nodes, node.block) for i in node.inputs]
        nodes.append(node)
    added = len(nodes) - len(g.nodes)
    g.nodes[:] = nodes
    g.prune()
    g.verify()
    return added


def _kept(g: Graph, mode: Mode) -> set[Value]:
    """Forward values that stay in memory for the backward pass."""
    kept: set[Value] = set()
    crossing: set[Value] = set()
    for node in g.nodes:
        if node.phase == "forward":
            crossing.update(i for i in node.inputs if i is not None and i.producer and i.producer.block != node.block)
    for node in g.nodes:
        op = get_op(node.op)
        for index, out in enumerate(node.outputs):
            if out is None or node.phase != "forward":
                continue
            if op.transient or (mode != "off" and _norm_of_sum(node, index)):
                continue  # the latter: a norm of something kept
            if mode == "block":
                drop = node.block >= 0 and out not in crossing
            else:
                drop = mode == "selective" and op.cheap
            if not drop:
                kept.add(out)
    return kept


def _norm_of_sum(node: Node, index: int) -> bool:
    """The normalised result of ``add_rmsnorm`` follows from its first result."""
    return node.op == "add_rmsnorm" and index > 0


def _again(g: Graph, value: Value, kept: set[Value], clones: dict[Value, Value], into: list[Node], block: int) -> Value:
    """The value itself if it is kept, else its copy computed again in front of the reader."""
    node = value.producer
    if node is None or node.phase != "forward" or value in kept:
        return value
    if value in clones:
        return clones[value]
    if _norm_of_sum(node, value.index):
        h, weight = node.outputs[0], node.inputs[2]
        assert h is not None
        h = _again(g, h, kept, clones, into, block)
        with g.at(scope=node.scope, block=block, phase="recompute", into=into):
            y, rstd = g.emit("rmsnorm", [h, weight], **node.attrs)
        for old, new in zip(node.outputs[1:], (y, rstd), strict=True):
            if old is not None and new is not None:
                clones[old] = new
        return clones[value]
    inputs = [None if i is None else _again(g, i, kept, clones, into, block) for i in node.inputs]
    with g.at(scope=node.scope, block=block, phase="recompute", into=into):
        outs = g.emit(node.op, inputs, **node.attrs)
    if get_op(node.op).transient:  # every reader has its own
        made = outs[value.index]
        assert made is not None
        return made
    for old, new in zip(node.outputs, outs, strict=True):
        if old is not None and new is not None:
            clones[old] = new
    return clones[value]
