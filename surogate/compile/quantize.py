"""Frozen weights in four bits (QLoRA, Dettmers et al. 2023): their products read what an op makes whole just before.

The op's result is never kept (``Op.transient``), so all products share one scratch, which is as large as the largest
weight. Weights that stand below one another for one product stay quantised one by one, as files have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from surogate.graph import Graph, Node, Type, Value
from surogate.ops import nf4
from surogate.ops.blockwise8 import table


@dataclass(frozen=True)
class Quantized:
    """How a weight is stored. ``dtype``: what it is rounded to before and after; ``slots``: of codes, absmax, groups
    and offset (``surogate.ops.dequantize_nf4``)."""

    shape: tuple[int, ...]
    dtype: str
    slots: tuple[str, str, str, str]


def quantize(g: Graph) -> dict[str, Quantized]:
    """Store every frozen linear layer's weight in NF4; the output head, the embedding and what is no matrix stay.

    Args:
        g: forward graph, packed; changed in place.

    Returns:
        What became of the weights, by their names.
    """
    found: dict[str, Quantized] = {}
    made: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in list(g.nodes):
        weight = node.inputs[1] if node.op == "matmul" else None
        if weight is not None and weight not in made and _suits(g, weight):
            with g.at(scope=node.scope, block=node.block, phase=node.phase, into=nodes):
                made[weight] = _whole(g, weight, found)
        nodes.append(node)
    g.nodes[:] = nodes
    g.replace(made)
    for weight in made:
        g.drop_source(weight)
    g.verify()
    return found


def _suits(g: Graph, weight: Value) -> bool:
    if weight.kind != "param" or weight.trainable or len(weight.shape) != 2 or not weight.name.endswith(".weight"):
        return False
    readers = g.uses()[weight]
    return all(n.op == "matmul" for n in readers) and not any(
        rows * weight.shape[1] % 2 for _, _, rows in _parts(g, weight)
    )


def _parts(g: Graph, weight: Value) -> list[tuple[str, int, int]]:
    return g.packed.get(weight.name) or [(weight.name, 0, weight.shape[0])]


def _whole(g: Graph, weight: Value, found: dict[str, Quantized]) -> Value:
    """Emit the ops that make the weight whole, one for each of its parts."""
    rows, columns = weight.shape
    eight = _constant(g, "table_signed", table(True))
    numbers = _constant(g, "nf4_numbers", nf4.NF4)
    y: Value | None = None
    for name, first, count in _parts(g, weight):
        blocks = -(-count * columns // nf4.BLOCK)
        types = {
            "codes": Type((count * columns // 2,), "u8"), "absmax": Type((blocks,), "u8"),
            "groups": Type((-(-blocks // nf4.GROUP),)), "offset": Type((1,)),
        }  # fmt: skip
        codes, absmax, groups, offset = (g.source(f"{name}.{n}", t, "param") for n, t in types.items())
        y = g.one(
            "dequantize_nf4", [codes, absmax, groups, offset, eight, numbers, y], rows=rows, columns=columns,
            first=first, block=nf4.BLOCK, dtype=weight.dtype,
        )  # fmt: skip
        slots = (codes.name, absmax.name, groups.name, offset.name)
        found[name] = Quantized((count, columns), weight.dtype, slots)
    assert y is not None
    return y


def _constant(g: Graph, name: str, array) -> Value:  # type: ignore[no-untyped-def]
    found = g.find(name)
    if found is None:
        found = g.source(name, Type(array.shape), "const")
        g.constants[name] = array
    return found
