"""Rotary position embedding (Su et al. 2021) in the half-rotation convention of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, f32, typed


class RopeTable(Op):
    """positions[T] i32, inv_freq[C/2] f32 -> cos[T,C/2], sin[T,C/2] of positions x inv_freq, times ``scale``.

    The angle is a float64 product: in f32 the angle of position 100 000 is off by up to 4e-3 radians.
    Attribute ``scale``: float, the attention factor of long-context variants such as YaRN (1 for plain RoPE).
    """

    name = "rope_table"

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        positions, inv_freq = typed(inputs[0], self, "positions"), f32(inputs[1], self, "inv_freq")
        fits = positions.dtype == "i32" and len(positions.shape) == 1 and len(inv_freq.shape) == 1
        expect(fits, self, f"{positions} and {inv_freq} are not i32[T] and f32[C/2]")
        table = Type((*positions.shape, *inv_freq.shape))
        return [table, table]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        angle = np.multiply.outer(array(inputs[0]).astype(np.float64), array(inputs[1]))
        return [np.cos(angle) * attrs["scale"], np.sin(angle) * attrs["scale"]]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        return [None, None]  # positions and frequencies are constants

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        table = typed(outputs[0], self, "cos")
        return Cost(40 * table.numel, 2 * table.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for half, scale in [(3, 1.0), (32, 1.25)]:
            inv_freq = 10000.0 ** -(np.arange(half) / half)
            yield Sample([rng.integers(0, 100_000, 17), inv_freq], {"scale": scale})


class Rope(Op):
    """x[T,H,C], cos[T,C/2], sin[T,C/2] -> y[T,H,C]; every head of a token is rotated by the token's angles.

    With x = (x1, x2) split in halves of C: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
    Attribute ``inverse``: bool, rotate by the negative angle.
    """

    name = "rope"
    may_reuse = {0: (0,)}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x, cos, sin = activation(inputs[0], self, "x"), f32(inputs[1], self, "cos"), f32(inputs[2], self, "sin")
        fits = len(x.shape) == 3 and x.shape[2] % 2 == 0 and cos.shape == (x.shape[0], x.shape[2] // 2)
        expect(fits and cos == sin, self, f"{x}, {cos} and {sin} do not fit")
        return [x]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        x, cos, sin = array(inputs[0]), array(inputs[1])[:, None], array(inputs[2])[:, None]
        if attrs["inverse"]:
            sin = -sin
        x1, x2 = np.split(x, 2, axis=-1)
        return [np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not needs[0]:
            return [None, None, None]
        # The transpose of a rotation is the rotation back, also where the table is scaled.
        dx = g.one("rope", [d[0], node.inputs[1], node.inputs[2]], inverse=not node.attrs["inverse"])
        return [dx, None, None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(3 * x.numel, 2 * x.nbytes + 2 * typed(inputs[1], self, "cos").nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for tokens, heads, width, inverse in [(5, 3, 6, False), (7, 1, 34, True), (40, 2, 64, False)]:
            angle = rng.uniform(0, 6, size=(tokens, width // 2))
            yield Sample(
                [rng.normal(size=(tokens, heads, width)), np.cos(angle), np.sin(angle)],
                {"inverse": inverse},
                differentiable=(0,),
            )
