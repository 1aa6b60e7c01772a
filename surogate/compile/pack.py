"""Packing: matrix products that share their input become one, with their weights one below the other in memory.

q, k and v of an attention layer, gate and up of an MLP, and the A matrices of their adapters. The parts keep their
names as windows on the packed weight (``Graph.packed``), so files know nothing of it.
"""

from __future__ import annotations

from surogate.graph import Graph, Node, Type, Value


def pack(g: Graph, like: Graph | None = None) -> int:
    """Pack products with one input, in the same module, with weights of one kind; returns the number of groups.

    ``like``: another graph over the same weights, already packed. What it keeps apart stays apart here too, since a
    weight has one place: dropout, for one, gives every adapter an input of its own in training, and in evaluation they
    share one.
    """
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in g.nodes:
        key = _key(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    uses = g.uses()
    chosen = [nodes for nodes in groups.values() if len(nodes) > 1 and all(_alone(n, uses) for n in nodes)]
    if like is not None:
        held = {tuple(name for name, _, _ in parts) for parts in like.packed.values()}
        chosen = [nodes for nodes in chosen if _names(nodes) in held]
    for nodes in chosen:
        _merge(g, nodes)
    g.verify()
    return len(chosen)


def _names(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(n.inputs[1].name for n in nodes if n.inputs[1] is not None)


def _key(node: Node) -> tuple[object, ...] | None:
    """What products must share to be packed."""
    if node.op != "matmul" or node.inputs[3] is not None or not node.attrs["tb"] or node.attrs["ta"]:
        return None
    x, weight, bias = node.inputs[0], node.inputs[1], node.inputs[2]
    if weight is None or weight.kind != "param" or (bias is not None and bias.kind != "param"):
        return None
    adapter = weight.name.endswith(".lora_A.weight")
    parent = node.scope.rsplit(".", 1)[0]
    return (x, parent, weight.trainable, weight.dtype, adapter, bias is not None, node.attrs["alpha"])


def _alone(node: Node, uses: dict[Value, list[Node]]) -> bool:
    """A weight that something else reads too keeps its own place."""
    return all(len(uses[i]) == 1 for i in node.inputs[1:3] if i is not None)


def _joined(g: Graph, parts: list[Value]) -> Value:
    """One source whose rows are those of ``parts``; the parts leave the graph."""
    names = [p.name for p in parts]
    stem = names[0].rsplit(".", 1)[-1]
    owners = [n.removesuffix("." + stem) for n in names]
    prefix = owners[0].rsplit(".", 1)[0] if "." in owners[0] else ""
    shared = owners[0].rsplit(".", 2)[0] if owners[0].endswith(".lora_A") else prefix
    label = "+".join(o.removeprefix(shared + ".") for o in owners)
    rows = [p.shape[0] for p in parts]
    first = parts[0]
    value = g.source(
        f"{shared}.[{label}].{stem}",
        Type((sum(rows), *first.shape[1:]), first.dtype),
        "param",
        trainable=first.trainable,
    )
    start, table = 0, []
    for part, n in zip(parts, rows, strict=True):
        table.append((part.name, start, n))
        start += n
        g.drop_source(part)
    g.packed[value.name] = table
    return value


def _merge(g: Graph, nodes: list[Node]) -> None:
    first = nodes[0]
    weights = [n.inputs[1] for n in nodes]
    biases = [n.inputs[2] for n in nodes]
    weight = _joined(g, [w for w in weights if w is not None])
    bias = _joined(g, [b for b in biases if b is not None]) if biases[0] is not None else None
    sizes = tuple(w.shape[0] for w in weights if w is not None)
    place = g.nodes.index(first)
    fresh: list[Node] = []
    with g.at(scope=first.scope.rsplit(".", 1)[0], block=first.block, phase=first.phase, into=fresh):
        y = g.one("matmul", [first.inputs[0], weight, bias, None], **first.attrs)
        pieces = g.emit("split", [y], sizes=sizes)
    g.nodes[place:place] = fresh
    gone = set(map(id, nodes))
    g.nodes[:] = [n for n in g.nodes if id(n) not in gone]
    g.replace({o: p for n, p in zip(nodes, pieces, strict=True) if (o := n.outputs[0]) is not None and p is not None})
