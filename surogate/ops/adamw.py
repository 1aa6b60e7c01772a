"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from surogate.graph import Type
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, array, expect, f32, typed, weight
from surogate.ops.philox import random_words


def _bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32).astype(np.uint64)


def _from_high_half(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32).astype(np.float64)


def round_nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Finite values rounded to the nearest bf16, ties to even."""
    bits = _bits(x)
    return _from_high_half(bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1)))


def round_stochastic_bf16(x: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Finite values rounded to one of the two bf16 neighbours, so that the mean over ``words`` (uint32) is the value.

    The word's high half is added to the 16 bits that are cut off.
    """
    return _from_high_half(_bits(x) + (words >> np.uint32(16)).astype(np.uint64))


class AdamW(Op):
    """One update of a parameter; everything is in place and the gradient is set back to zero.

    p, g, m, v (one shape), lr[1], bias_correction1[1], bias_correction2[1], scale[1], master?, seed[1]? i64,
    moments_seed[1]? i64 -> p, g, m, v, master?

    All f32 but ``p``, which may be bf16: then either ``master`` (f32, same shape) carries the precise value and ``p``
    is its rounding to nearest, or ``seed`` is given and ``p`` is rounded stochastically (Philox, counter
    (index/4, salt)). ``m`` and ``v`` may be bf16 too, with ``moments_seed``: they are rounded stochastically, m by the
    high and v by the low halves of the words of counter (index/4, salt + 2^32). Rounded to nearest, a second moment
    could not sink at the rate of 1 - beta2, which is less than half a step between bf16 numbers. The weight moves by
    the moments before they are rounded. With G = g * scale:

        p <- p * (1 - lr * weight_decay)
        m <- beta1 * m + (1 - beta1) * G
        v <- beta2 * v + (1 - beta2) * G^2
        p <- p - lr / bias_correction1 * m / (sqrt(v / bias_correction2) + eps)

    ``bias_correctionK`` is 1 - betaK^t for step t = 1, 2, ... Attributes ``beta1 beta2 eps weight_decay``: float;
    ``salt``: int, different for every parameter.
    """

    name = "adamw"
    inplace = {0: 0, 1: 1, 2: 2, 3: 3, 4: 8}

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        p, master, seed = weight(inputs[0], self, "p"), inputs[8], inputs[9]
        m = weight(inputs[2], self, "m")
        for found, what in [(f32(inputs[1], self, "g"), "g"), (m, "m"), (weight(inputs[3], self, "v"), "v")]:
            expect(found.shape == p.shape, self, f"{what} is {found}, which does not fit {p}")
        expect(inputs[3] == m, self, f"m is {m} and v {inputs[3]}: both or neither are bf16")
        for i, what in [(4, "lr"), (5, "bias_correction1"), (6, "bias_correction2"), (7, "scale")]:
            expect(f32(inputs[i], self, what).shape == (1,), self, f"{what} is {inputs[i]}, not f32[1]")
        expect(master is None or master == Type(p.shape), self, f"master {master} does not fit {p}")
        expect(seed is None or seed == Type((1,), "i64"), self, f"seed is {seed}, not i64[1]")
        given = (master is not None) + (seed is not None)
        expect(given == (p.dtype == "bf16"), self, f"p is {p}: bf16 takes a master or a seed, f32 neither")
        moments_seed = inputs[10] if len(inputs) > 10 else None
        expect(moments_seed is None or moments_seed == Type((1,), "i64"), self, f"moments_seed is {moments_seed}")
        expect((moments_seed is None) == (m.dtype == "f32"), self, f"m is {m}: bf16 takes a moments_seed, f32 none")
        return [p, inputs[1], inputs[2], inputs[3], master]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        p, g, m, v = (array(inputs[i]) for i in range(4))
        lr, correction1, correction2, scale = (float(array(inputs[i])[0]) for i in range(4, 8))
        master, seed = inputs[8], inputs[9]
        g = g * scale
        m = attrs["beta1"] * m + (1.0 - attrs["beta1"]) * g
        v = attrs["beta2"] * v + (1.0 - attrs["beta2"]) * g * g
        new = (p if master is None else master) * (1.0 - lr * attrs["weight_decay"])
        new = new - lr / correction1 * m / (np.sqrt(v / correction2) + attrs["eps"])
        zero = np.zeros_like(g)
        if len(inputs) > 10 and inputs[10] is not None:
            words = random_words(p.size, int(inputs[10][0]), attrs["salt"] + (1 << 32)).reshape(p.shape)
            m, v = round_stochastic_bf16(m, words), round_stochastic_bf16(v, words << np.uint32(16))
        if master is not None:
            return [round_nearest_bf16(new), zero, m, v, new]
        if seed is not None:
            words = random_words(p.size, int(seed[0]), attrs["salt"]).reshape(p.shape)
            return [round_stochastic_bf16(new, words), zero, m, v, None]
        return [new, zero, m, v, None]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        moved = 2 * sum(typed(t, self, "operand").nbytes for t in [*inputs[:4], *inputs[8:9]] if t is not None)
        return Cost(14 * typed(inputs[0], self, "p").numel, moved)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        cases = [
            ((37,), "f32", False, "f32"), ((5, 7), "bf16", True, "f32"), ((3, 401), "bf16", False, "f32"),
            ((41,), "f32", False, "bf16"), ((2, 9), "bf16", True, "bf16"), ((3, 401), "bf16", False, "bf16"),
        ]  # fmt: skip
        for shape, dtype, master, moments in cases:
            p = rng.normal(size=shape)
            yield Sample(
                [
                    p,
                    rng.normal(size=shape),
                    0.1 * rng.normal(size=shape),
                    rng.uniform(0.01, 0.1, size=shape),
                    np.array([1e-2]),
                    np.array([1.0 - 0.9**3]),
                    np.array([1.0 - 0.99**3]),
                    np.array([0.7]),
                    p + 1e-4 * rng.normal(size=shape) if master else None,
                    np.array([91]) if dtype == "bf16" and not master else None,
                    np.array([91]) if moments == "bf16" else None,
                ],
                {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "salt": 5},
                dtypes=[dtype, None, moments, moments, *[None] * 5, "i64", "i64"],
                # f32 and float64 may fall on different sides of a rounding boundary: one bf16 step apart.
                rtol=2e-5 if dtype == moments == "f32" else 2.0**-7,
            )
