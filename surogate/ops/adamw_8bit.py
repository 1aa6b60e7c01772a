"""AdamW whose moments are kept in eight bits an element (Dettmers et al. 2021), see ``surogate.ops.blockwise8``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops.adamw import round_nearest_bf16, round_stochastic_bf16
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, array, expect, f32, typed, weight
from surogate.ops.blockwise8 import BLOCK, dequantize, dynamic_map, quantize, table
from surogate.ops.philox import random_words


def _fma(a: np.ndarray | np.float32, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 with one rounding (but for sums that float64 rounds first)."""
    wide: np.ndarray = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(np.float32)


class AdamW8bit(Op):
    """One update as ``adamw`` makes it, between moments that are stored in blocks of 256.

    p[N], g[N], m[N] u8, v[N] u8, absmax_m[N/256], absmax_v[N/256], table_m[512], table_v[512], lr[1],
    bias_correction1[1], bias_correction2[1], scale[1], master[N]?, seed[1]? i64
    -> p, g, m, v, absmax_m, absmax_v, master?

    N is a multiple of 256. f32 where nothing else is said; ``p``, ``master``, ``seed`` and attributes as in ``adamw``.
    The weight moves by the new moments before they are rounded. In float32, bit for bit what bitsandbytes computes:

        m <- fma(1 - beta1, G, beta1 * m)
        v <- fma((1 - beta2) * G, G, beta2 * v)
    """

    name = "adamw_8bit"
    inplace = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 12}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        p, master, seed = weight(inputs[0], self, "p"), inputs[12], inputs[13]
        n = p.numel
        expect(p.shape == (n,) and n % BLOCK == 0, self, f"p is {p}, not flat in blocks of {BLOCK}")
        expect(f32(inputs[1], self, "g").shape == p.shape, self, f"g is {inputs[1]}, which does not fit {p}")
        for i, what in [(2, "m"), (3, "v")]:
            expect(inputs[i] == Type((n,), "u8"), self, f"{what} is {inputs[i]}, not u8[{n}]")
        for i, what in [(4, "absmax_m"), (5, "absmax_v")]:
            expect(f32(inputs[i], self, what).shape == (n // BLOCK,), self, f"{what} is {inputs[i]}")
        for i, what in [(6, "table_m"), (7, "table_v")]:
            expect(f32(inputs[i], self, what).shape == (512,), self, f"{what} is {inputs[i]}, not f32[512]")
        for i, what in [(8, "lr"), (9, "bias_correction1"), (10, "bias_correction2"), (11, "scale")]:
            expect(f32(inputs[i], self, what).shape == (1,), self, f"{what} is {inputs[i]}, not f32[1]")
        expect(master is None or master == Type(p.shape), self, f"master {master} does not fit {p}")
        expect(seed is None or seed == Type((1,), "i64"), self, f"seed is {seed}, not i64[1]")
        given = (master is not None) + (seed is not None)
        expect(given == (p.dtype == "bf16"), self, f"p is {p}: bf16 takes a master or a seed, f32 neither")
        return [p, *inputs[1:6], master]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        p, g, m, v, absmax_m, absmax_v, table_m, table_v = (array(inputs[i]) for i in range(8))
        lr, correction1, correction2 = (float(array(inputs[i])[0]) for i in range(8, 11))
        code_m, code_v = (t[:256].astype(np.float32) for t in (table_m, table_v))
        master, seed = inputs[12], inputs[13]
        gradient = g.astype(np.float32) * np.float32(array(inputs[11])[0])
        beta1, beta2 = attrs["beta1"], attrs["beta2"]
        first = np.float32(beta1) * dequantize(m, absmax_m, code_m)
        first = _fma(np.float32(1.0 - beta1), gradient, first)
        second = np.float32(beta2) * dequantize(v, absmax_v, code_v)
        second = _fma(np.float32(1.0 - beta2) * gradient, gradient, second)
        new = (p if master is None else master) * (1.0 - lr * attrs["weight_decay"])
        root = np.sqrt(second.astype(np.float64) / correction2)
        new = new - lr / correction1 * first.astype(np.float64) / (root + attrs["eps"])
        (m, absmax_m), (v, absmax_v) = quantize(first, code_m), quantize(second, code_v)
        states = [m, v, absmax_m.astype(np.float64), absmax_v.astype(np.float64)]
        zero = np.zeros_like(g)
        if master is not None:
            return [round_nearest_bf16(new), zero, *states, new]
        if seed is not None:
            return [round_stochastic_bf16(new, random_words(p.size, int(seed[0]), attrs["salt"])), zero, *states, None]
        return [new, zero, *states, None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        moved = 2 * sum(t.nbytes for t in [*inputs[:6], inputs[12]] if t is not None)
        return Cost(40 * typed(inputs[0], self, "p").numel, moved)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for blocks, dtype, master in [(1, "f32", False), (5, "bf16", True), (131, "bf16", False)]:
            n = blocks * BLOCK
            p, g = rng.normal(size=n), rng.normal(size=n) * 10.0 ** rng.integers(-6, 1, size=n)
            g[:BLOCK:3] = 0.0
            if blocks > 1:
                g[BLOCK : 2 * BLOCK] = 0.0
            m, absmax_m = quantize(0.1 * g + 0.01 * rng.normal(size=n), dynamic_map(True))
            v, absmax_v = quantize(g * g * rng.random(size=n), dynamic_map(False))
            yield Sample(
                [
                    p, g, m, v, absmax_m.astype(np.float64), absmax_v.astype(np.float64),
                    table(True).astype(np.float64), table(False).astype(np.float64),
                    np.array([1e-2]), np.array([1.0 - 0.9**3]), np.array([1.0 - 0.99**3]), np.array([0.7]),
                    p + 1e-4 * rng.normal(size=n) if master else None,
                    np.array([91]) if dtype == "bf16" and not master else None,
                ],
                {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "salt": 5},
                dtypes=[dtype, None, "u8", "u8", *[None] * 9, "i64"],
                rtol=2e-5 if dtype == "f32" else 2.0**-7,
            )  # fmt: skip
