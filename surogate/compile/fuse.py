"""Fusion of neighbours that read and write the same memory."""

from __future__ import annotations

from surogate.graph import Graph, Node, Value
from surogate.ops import get_op
from surogate.ops.qk_norm_rope import MOST_DIM


def fuse_forward(g: Graph) -> None:
    """``rmsnorm(a + b)`` becomes ``add_rmsnorm``; ``silu(a) * b`` becomes ``swiglu``; norm and rotation of q and k
    before attention become ``qk_norm_rope``."""
    uses = g.uses()
    for node in list(g.nodes):
        if node.op == "add":
            _residual_norm(g, node, uses)
        elif node.op == "mul":
            _swiglu(g, node, uses)
        elif node.op == "attention":
            _qk_norm_rope(g, node, uses)
    g.prune()
    g.verify()


def _residual_norm(g: Graph, add: Node, uses: dict[Value, list[Node]]) -> None:
    h = add.outputs[0]
    assert h is not None
    norm = next((n for n in uses.get(h, []) if n.op == "rmsnorm" and n.inputs[0] is h), None)
    if norm is None or norm.inputs[1] is None or norm.inputs[1].kind != "param" or add.inputs[0] is add.inputs[1]:
        return
    place = g.nodes.index(add)
    fresh: list[Node] = []
    with g.at(scope=norm.scope, block=add.block, phase=add.phase, into=fresh):
        outs = g.emit("add_rmsnorm", [*add.inputs, norm.inputs[1]], **norm.attrs)
    g.nodes[place : place + 1] = fresh
    g.nodes.remove(norm)
    olds = [h, *norm.outputs]
    g.replace({old: new for old, new in zip(olds, outs, strict=True) if old is not None and new is not None})
    for old, new in zip(olds, outs, strict=True):
        if old is not None and new is not None:
            uses[new] = [n for n in uses.get(old, []) if n is not norm]


def _swiglu(g: Graph, mul: Node, uses: dict[Value, list[Node]]) -> None:
    for index in (0, 1):
        gate, other = mul.inputs[index], mul.inputs[1 - index]
        producer = gate.producer if gate is not None else None
        if gate is None or producer is None or producer.op != "silu" or len(uses[gate]) != 1:
            continue
        mul.op, mul.inputs, mul.attrs = "swiglu", [producer.inputs[0], other], {}
        return


def _qk_norm_rope(g: Graph, attention: Node, uses: dict[Value, list[Node]]) -> None:
    ropes = [i.producer if i is not None else None for i in attention.inputs[:2]]
    if any(r is None or r.op != "rope" or r.attrs["inverse"] for r in ropes) or ropes[0] is ropes[1]:
        return
    rq, rk = (r for r in ropes if r is not None)
    norms = [r.inputs[0].producer if r.inputs[0] is not None else None for r in (rq, rk)]
    if any(n is None or n.op != "rmsnorm" or len(uses[n.outputs[0]]) != 1 for n in norms):  # type: ignore[index]
        return
    nq, nk = (n for n in norms if n is not None)
    if rq.inputs[1:] != rk.inputs[1:] or nq.attrs != nk.attrs or any(n.inputs[1] is None for n in (nq, nk)):
        return
    if rq.outputs[0] is None or rq.outputs[0].shape[2] > MOST_DIM:
        return
    if any(uses.get(n.outputs[1]) for n in (nq, nk) if n.outputs[1] is not None):
        return  # a root mean square that something else reads
    old = [r.outputs[0] for r in (rq, rk)]
    place = max(g.nodes.index(rq), g.nodes.index(rk))
    if any(g.nodes.index(reader) < place for o in old if o is not None for reader in uses[o]):
        return
    fresh: list[Node] = []
    # The scope of the attention layer: the norms' own lie below it.
    with g.at(scope=rq.scope, block=rq.block, phase=rq.phase, into=fresh):
        outs = g.emit(
            "qk_norm_rope",
            [nq.inputs[0], nk.inputs[0], nq.inputs[1], nk.inputs[1], *rq.inputs[1:]],
            eps=nq.attrs["eps"],
        )
    g.nodes[place + 1 : place + 1] = fresh
    gone = {id(n) for n in (rq, rk, nq, nk)}
    g.nodes[:] = [n for n in g.nodes if id(n) not in gone]
    g.replace({o: n for o, n in zip(old, outs, strict=True) if o is not None and n is not None})


def fuse_accumulate(g: Graph) -> None:
    """``a + f(...)`` becomes ``f(..., acc=a)`` where f can add to an operand in place.

    This is how gradients that arrive from several sides, and gradients of several micro-batches, cost no pass over
    memory of their own. It needs: f's result has no other reader, ``a`` is computed before f, and nothing reads ``a``
    afterwards.
    """
    place = {n: i for i, n in enumerate(g.nodes)}  # order alone counts, so it stays right while nodes go
    uses = g.uses()
    gone: dict[Node, tuple[Value, Value]] = {}
    for add in [n for n in g.nodes if n.op == "add"]:
        total = add.outputs[0]
        assert total is not None
        for index in (1, 0):
            term, base = add.inputs[index], add.inputs[1 - index]
            if term is None or base is None or term is base or term.producer is None:
                continue
            if base.kind == "temp" and (base.producer is None or get_op(base.producer.op).view):
                continue
            if base.kind == "param" or base in g.outputs:
                continue
            f = term.producer
            op = get_op(f.op)
            slot = op.inplace.get(term.index)
            if term.index not in op.accumulates or slot is None or f.inputs[slot] is not None or uses[term] != [add]:
                continue
            before = base.producer is None or place[base.producer] < place[f]
            others = [n for n in uses[base] if n is not add]
            if not before or any(place[n] >= place[f] for n in others):
                continue
            f.inputs[slot] = base
            gone[add] = (total, term)
            uses[base], uses[term] = [*others, f], uses.get(total, [])
            for reader in uses[term]:
                reader.inputs = [term if i is total else i for i in reader.inputs]
            break
    g.nodes[:] = [n for n in g.nodes if n not in gone]
    g.replace(dict(gone.values()))
    g.verify()
