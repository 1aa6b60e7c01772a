"""Reverse-mode differentiation: the gradient rules of the ops, applied from the loss back to the trained weights."""

from __future__ import annotations

from surogate.graph import Graph, GraphError, Node, Type, Value
from surogate.ops import get_op


def differentiate(g: Graph) -> dict[Value, list[Value]]:
    """Extend a forward graph, whose only output is a loss, by its backward pass.

    Only what a trainable parameter needs is computed. The loss op becomes its variant that leaves its gradients behind
    (scaled by the input ``loss_scale``) and adds to the state ``loss``.

    Returns:
        For every trainable parameter the values whose sum is its gradient, in the order in which they are computed.
    """
    loss = g.outputs[0]
    forward = list(g.nodes)
    needed = _needed(g)
    node = loss.producer
    if node is None or node.op != "lm_head_loss":
        raise GraphError(f"{g.name}: the objective must end in a loss op, found {node.op if node else loss}")
    cotangents: dict[Value, Value] = {}
    gradients: dict[Value, list[Value]] = {s: [] for s in g.sources if s.trainable}

    def give(value: Value | None, cotangent: Value | None) -> None:
        if value is None or cotangent is None:
            return
        if value in gradients:
            gradients[value].append(cotangent)
        elif value.kind == "temp":
            held = cotangents.get(value)
            cotangents[value] = cotangent if held is None else g.one("add", [held, cotangent])

    forward.remove(node)
    g.nodes.remove(node)
    _seed(g, node, needed, give)
    for n in reversed(forward):
        d = [None if o is None else cotangents.pop(o, None) for o in n.outputs]
        needs = [i is not None and i in needed for i in n.inputs]
        if all(c is None for c in d) or not any(needs):
            continue
        with g.at(scope=n.scope, block=n.block, phase="backward"):
            for value, cotangent in zip(n.inputs, get_op(n.op).gradient(g, n, d, needs), strict=False):
                give(value, cotangent)
    unreached = [s.name for s, terms in gradients.items() if not terms]
    if unreached:
        raise GraphError(f"{g.name}: no gradient reaches {', '.join(unreached)}")
    return gradients


def _needed(g: Graph) -> set[Value]:
    """Values that a trainable parameter influences."""
    needed = {s for s in g.sources if s.trainable}
    for node in g.nodes:
        if any(i in needed for i in node.inputs if i is not None):
            needed.update(o for o in node.outputs if o is not None)
    return needed


def _seed(g: Graph, node: Node, needed: set[Value], give) -> None:  # type: ignore[no-untyped-def]
    """Replace the loss by its gradient-leaving variant and hand out its cotangents."""
    hidden, weight, targets = node.inputs[:3]
    scale = g.source("loss_scale", Type((1,)), "input")
    held = g.source("loss", Type((1,), "f64"), "state")
    with g.at(scope=node.scope, block=-1, phase="backward"):
        total, dh, dw = g.emit(
            "lm_head_loss_grad", [hidden, weight, targets, scale, held, None], need_dw=weight in needed
        )
    assert total is not None
    g.outputs = []
    g.updates[held] = total
    give(hidden, dh)
    give(weight, dw)


def accumulate(g: Graph, gradients: dict[Value, list[Value]]) -> dict[Value, Value]:
    """Add every gradient to a state ``grad.<name>`` that lives from micro-batch to micro-batch.

    Returns:
        The state of each trainable parameter.
    """
    states: dict[Value, Value] = {}
    for param, terms in gradients.items():
        state = g.source(f"grad.{param.name}", Type(param.shape), "state")
        states[param] = state
        total = state
        for term in terms:
            producer = term.producer
            assert producer is not None
            slot = get_op(producer.op).inplace.get(term.index)
            direct = term.index in get_op(producer.op).accumulates and slot is not None
            if direct and slot is not None and producer.inputs[slot] is None and not _read(g, term):
                producer.inputs[slot] = total
                total = term
            else:
                place = g.nodes.index(producer) + 1
                fresh: list[Node] = []
                with g.at(scope=producer.scope, block=producer.block, phase="backward", into=fresh):
                    total = g.one("add", [total, term])
                g.nodes[place:place] = fresh
        g.updates[state] = total
    g.prune()
    g.verify()
    return states


def _read(g: Graph, value: Value) -> bool:
    return any(value in n.inputs for n in g.nodes)
