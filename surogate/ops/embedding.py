"""Token embedding: rows of a table picked by token id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import (
    Arrays,
    Attrs,
    Cost,
    Op,
    Sample,
    Types,
    accumulator,
    activation,
    array,
    expect,
    typed,
    weight,
)


def _ids(value: Type | None, op: Op) -> Type:
    ids = typed(value, op, "ids")
    expect(ids.dtype == "i32" and len(ids.shape) == 1, op, f"ids are {ids}, not i32[T]")
    return ids


class Embedding(Op):
    """table[V,D] (f32 or bf16), ids[T] i32 in [0,V) -> y[T,D]. The CPU kernel raises for an id outside the table.

    Attribute ``dtype``: of y, f32 if left out. Activations that follow take it over.
    """

    name = "embedding"
    cheap = True

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        table, ids = weight(inputs[0], self, "table"), _ids(inputs[1], self)
        expect(len(table.shape) == 2, self, f"table is {table}, not [V,D]")
        return [Type((*ids.shape, table.shape[1]), attrs.get("dtype", "f32"))]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [array(inputs[0])[array(inputs[1])]]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        table, ids = node.inputs
        if d[0] is None or not needs[0]:
            return [None, None]
        assert table is not None
        return [g.one("embedding_backward", [d[0], ids, None], rows=table.shape[0]), None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        # Of the table only the rows that are picked are read.
        table, y = typed(inputs[0], self, "table"), typed(outputs[0], self, "y")
        width = 2 if table.dtype == "bf16" else 4
        return Cost(0, y.nbytes + y.numel * width)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for tokens, rows, width, dtype in [(7, 11, 5, "f32"), (40, 9, 130, "bf16")]:
            yield Sample(
                [rng.normal(size=(rows, width)), rng.integers(0, rows, tokens)],
                dtypes=[dtype, "i32"],
                differentiable=(0,),
            )


class EmbeddingBackward(Op):
    """dy[T,D], ids[T] i32, acc[V,D]? -> dtable[V,D]; row v is the sum of dy over the tokens with id v, in their order.

    Attribute ``rows``: V.
    """

    name = "embedding_backward"
    inplace = {0: 2}
    accumulates = frozenset({0})

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        dy, ids = activation(inputs[0], self, "dy"), _ids(inputs[1], self)
        expect(len(dy.shape) == 2 and dy.shape[:1] == ids.shape, self, f"{dy} and {ids} do not fit")
        out = Type((attrs["rows"], dy.shape[1]))
        accumulator(inputs[2], out, self)
        return [out]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        dy, ids = array(inputs[0]), array(inputs[1])
        out = np.zeros((attrs["rows"], dy.shape[1])) if inputs[2] is None else np.array(inputs[2])
        np.add.at(out, ids, dy)
        return [out]

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        # Where each id occurs first, and how often after that.
        return 8 * typed(outputs[0], self, "dtable").shape[0]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        dy = typed(inputs[0], self, "dy")
        zeroed = 0 if inputs[2] is not None else typed(outputs[0], self, "dtable").nbytes
        return Cost(dy.numel, 3 * dy.nbytes + zeroed)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for tokens, rows, width, acc in [(7, 11, 5, False), (40, 9, 130, True)]:
            yield Sample(
                [
                    rng.normal(size=(tokens, width)),
                    rng.integers(0, rows, tokens),
                    rng.normal(size=(rows, width)) if acc else None,
                ],
                {"rows": rows},
            )
