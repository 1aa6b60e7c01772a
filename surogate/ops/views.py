"""Views: results that are windows on the storage of an operand (or the other way round). They have no kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, array, expect, typed


class _View(Op):
    view = True

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        return Cost(0, 0)


class Split(_View):
    """x[...,N] -> one column view for each of ``sizes``, which sum to N. Attribute ``sizes``: tuple of int."""

    name = "split"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, sizes = typed(inputs[0], self, "x"), attrs["sizes"]
        fits = len(x.shape) >= 1 and all(n > 0 for n in sizes) and sum(sizes) == x.shape[-1]
        expect(fits, self, f"sizes {sizes} do not fit {x}")
        return [Type((*x.shape[:-1], n), x.dtype) for n in sizes]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return list(np.split(array(inputs[0]), np.cumsum(attrs["sizes"])[:-1], axis=-1))

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if not needs[0] or all(piece is None for piece in d):
            return [None]
        pieces: list[Value] = []
        for piece, out in zip(d, node.outputs, strict=True):
            assert out is not None
            pieces.append(g.one("fill", [], value=0.0, shape=out.shape, dtype=out.dtype) if piece is None else piece)
        return [g.one("concat", pieces)]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape, sizes in [((5, 7), (4, 1, 2)), ((3, 2, 33), (16, 17)), ((4, 6), (6,))]:
            yield Sample([rng.normal(size=shape)], {"sizes": sizes}, differentiable=(0,))


class Concat(_View):
    """Any number of x_i[...,N_i] -> y[...,sum N_i], side by side along the last dimension."""

    name = "concat"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        expect(len(inputs) >= 1, self, "no operands")
        types = [typed(t, self, f"operand {i}") for i, t in enumerate(inputs)]
        first = types[0]
        for t in types:
            fits = len(t.shape) >= 1 and t.shape[:-1] == first.shape[:-1] and t.dtype == first.dtype
            expect(fits, self, f"{t} does not stand beside {first}")
        return [Type((*first.shape[:-1], sum(t.shape[-1] for t in types)), first.dtype)]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [np.concatenate([array(x) for x in inputs], axis=-1)]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not any(needs):
            return [None] * len(node.inputs)
        sizes = tuple(x.shape[-1] for x in node.inputs if x is not None)
        pieces = g.emit("split", [d[0]], sizes=sizes)
        return [piece if needed else None for piece, needed in zip(pieces, needs, strict=True)]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for lead, sizes in [((5,), (4, 1, 2)), ((3, 2), (16, 17)), ((4,), (6,))]:
            pieces: list[np.ndarray | None] = [rng.normal(size=(*lead, n)) for n in sizes]
            yield Sample(pieces, differentiable=tuple(range(len(sizes))))


class Reshape(_View):
    """x -> the same elements in row-major order as ``shape``. Attribute ``shape``: tuple of int."""

    name = "reshape"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x = typed(inputs[0], self, "x")
        y = Type(tuple(attrs["shape"]), x.dtype)
        expect(all(n >= 0 for n in y.shape) and y.numel == x.numel, self, f"{x} does not have the elements of {y}")
        return [y]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [array(inputs[0]).reshape(attrs["shape"])]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not needs[0]:
            return [None]
        assert node.inputs[0] is not None
        return [g.one("reshape", [d[0]], shape=node.inputs[0].shape)]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([rng.normal(size=(5, 6))], {"shape": (5, 3, 2)}, differentiable=(0,))
        yield Sample([rng.normal(size=(3, 2, 7))], {"shape": (3, 14)}, differentiable=(0,))
        yield Sample([rng.normal(size=(4, 1))], {"shape": (4,)}, differentiable=(0,))
