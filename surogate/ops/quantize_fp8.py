"""FP8 operands of matrix products: quantisation with one scale a tensor, and the delayed choice of that scale.

A quantised tensor has a state, a row of float32: the scale (0: not known yet), the largest magnitude since the scale
was chosen, where the history goes on, one unused, then the history. A tensor is multiplied by the scale that earlier
steps gave and its own largest magnitude is noted on the way, so it is read once (Micikevicius et al. 2022, section 3).
Where nothing is known yet, its own magnitude gives the scale. Scales are powers of two: scaling loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, f32, typed
from surogate.ops.formats import E4M3, E5M2, Format

SCALE, AMAX, POSITION, HISTORY = 0, 1, 2, 4  # places in a row of state (csrc/core/formats.h)


def format_of(e5m2: bool) -> Format:
    """E4M3 for values, E5M2 for gradients."""
    return E5M2 if e5m2 else E4M3


def row_width(history: int) -> int:
    """Elements of a tensor's state: a multiple of 64, so that rows stand one after the other in memory."""
    return -(-(HISTORY + history) // 64) * 64


class QuantizeFP8(Op):
    """x[M,N], state[W]?, scale[2]? -> q[M,N] u8, scale[2] (factor, and its inverse), state, noted in place.

    With ``scale``, which an earlier call gave, that is taken and nothing is noted; without either, the tensor's own
    largest magnitude decides. Attribute ``e5m2``: bool.
    """

    name = "quantize_fp8"
    inplace = {2: 1}
    auxiliary = frozenset({0, 1, 2})

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        x = activation(inputs[0], self, "x")
        expect(len(x.shape) == 2, self, f"{x} is no matrix")
        state, scale = inputs[1], inputs[2]
        expect(state is None or scale is None, self, "has a state or a scale, not both")
        if state is not None:
            expect(f32(state, self, "state").shape[0] > HISTORY and len(state.shape) == 1, self, f"{state} is no state")
        expect(scale is None or scale == Type((2,)), self, f"{scale} is no scale")
        return [Type(x.shape, "u8"), Type((2,)), state]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        x, state, given = array(inputs[0]), inputs[1], inputs[2]
        form = format_of(attrs["e5m2"])
        amax = float(np.max(np.abs(x), initial=0.0))
        scale = float(state[SCALE]) if state is not None else float(given[0]) if given is not None else 0.0
        scale = scale or form.scale_for(amax)
        if state is not None:
            state = state.copy()
            state[AMAX] = np.maximum(state[AMAX], amax)
        return [form.encode(x * scale), np.array([scale, 1.0 / scale]), state]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(3 * x.numel, x.nbytes + x.numel)

    def workspace(self, inputs: Types, outputs: Types, attrs: Attrs, threads: int) -> int:
        """The largest magnitude of each row."""
        return 4 * typed(inputs[0], self, "x").shape[0]

    def workspace_cuda(self, inputs: Types, outputs: Types, attrs: Attrs, sm: int) -> int:
        return 64

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        def state(scale: float, amax: float) -> np.ndarray:
            row = np.zeros(64)
            row[[SCALE, AMAX, POSITION]] = scale, amax, 3
            return row

        for shape in [(5, 7), (33, 48), (3, 1030)]:
            for e5m2 in (False, True):
                x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 6, size=shape))
                yield Sample([x, state(16.0, 1e-3), None], {"e5m2": e5m2})
                yield Sample([x, state(0.0, 1e3), None], {"e5m2": e5m2})
                yield Sample([x, None, None], {"e5m2": e5m2}, dtypes=["bf16", None, None] if e5m2 else None)
                yield Sample([x, None, np.array([0.25, 4.0])], {"e5m2": e5m2})


class FP8UpdateScales(Op):
    """states[n*W] -> states, in place: each row's largest magnitude goes into its history, and the largest of the
    history gives the new scale. A magnitude that is not finite is forgotten.

    Attributes ``width``: W; ``history``: how many magnitudes are kept; ``e5m2``: bool.
    """

    name = "fp8_update_scales"
    inplace = {0: 0}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        states = f32(inputs[0], self, "states")
        fits = len(states.shape) == 1 and states.numel % attrs["width"] == 0
        expect(fits and 0 < attrs["history"] <= attrs["width"] - HISTORY, self, f"{states} are no rows of states")
        return [states]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        rows = array(inputs[0]).reshape(-1, attrs["width"]).copy()
        for row in rows:
            amax, at = row[AMAX], int(row[POSITION])
            row[AMAX] = 0.0
            if np.isfinite(amax):
                row[HISTORY + at] = amax
                row[POSITION] = (at + 1) % attrs["history"]
            most = row[HISTORY : HISTORY + attrs["history"]].max()
            row[SCALE] = format_of(attrs["e5m2"]).scale_for(most) if most > 0 else 0.0
        return [rows.reshape(-1)]

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        rows = np.zeros((5, 64))
        rows[:, HISTORY : HISTORY + 7] = np.exp(3 * rng.normal(size=(5, 7)))
        rows[:, AMAX], rows[:, POSITION] = [1e-3, 1e5, np.inf, np.nan, 0.0], [0, 6, 3, 5, 2]
        for e5m2 in (False, True):
            yield Sample([rows.reshape(-1)], {"width": 64, "history": 7, "e5m2": e5m2})
        yield Sample([np.zeros(2 * 128)], {"width": 128, "history": 100, "e5m2": False})
