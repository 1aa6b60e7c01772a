"""Activation functions, element by element, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from surogate.graph import Graph, Node, Type, Value
from surogate.ops.base import Arrays, Attrs, Cost, Op, Sample, Types, activation, array, expect, typed

Floats = NDArray[np.float64]

_SHAPES = [(5, 7), (3, 2, 33), (1100,)]
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _normal_distribution(x: Floats) -> Floats:
    """Phi(x) by erfc, which keeps its digits where 1 + erf cancels."""
    tail: Floats = _erfc(-x * math.sqrt(0.5))
    return 0.5 * tail


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


class _Activation(Op):
    """x -> y = f(x), any shape."""

    cheap = True
    may_reuse = {0: (0,)}
    flops: ClassVar[int] = 10

    def f(self, x: Floats) -> Floats:
        raise NotImplementedError

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        return [activation(inputs[0], self, "x")]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [self.f(array(inputs[0]))]

    def gradient(self, g: Graph, node: Node, d: Sequence[Value | None], needs: Sequence[bool]) -> list[Value | None]:
        if d[0] is None or not needs[0]:
            return [None]
        return [g.one(f"{self.name}_backward", [d[0], node.inputs[0]])]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[0], self, "x")
        return Cost(self.flops * x.numel, 2 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in _SHAPES:
            yield Sample([3 * rng.normal(size=shape)], differentiable=(0,))


class _ActivationBackward(Op):
    """dy, x -> dx = dy * f'(x), any shape."""

    may_reuse = {0: (0, 1)}
    flops: ClassVar[int] = 14

    def derivative(self, x: Floats) -> Floats:
        raise NotImplementedError

    def infer(self, inputs: Types, attrs: Attrs) -> list[Type | None]:
        dy, x = activation(inputs[0], self, "dy"), activation(inputs[1], self, "x")
        expect(dy == x, self, f"{dy} and {x} do not fit")
        return [x]

    def reference(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray | None]:
        return [array(inputs[0]) * self.derivative(array(inputs[1]))]

    def cost(self, inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        x = typed(inputs[1], self, "x")
        return Cost(self.flops * x.numel, 3 * x.nbytes)

    def samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for shape in _SHAPES:
            yield Sample([rng.normal(size=shape), 3 * rng.normal(size=shape)])


class Silu(_Activation):
    """x * sigmoid(x), also called swish (Elfwing et al. 2017)."""

    name = "silu"

    def f(self, x: Floats) -> Floats:
        return x * sigmoid(x)


class SiluBackward(_ActivationBackward):
    """dy * s * (1 + x * (1 - s)) with s = sigmoid(x)."""

    name = "silu_backward"

    def derivative(self, x: Floats) -> Floats:
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))


class Gelu(_Activation):
    """x * Phi(x), Phi the normal distribution function: the exact GELU (Hendrycks and Gimpel 2016)."""

    name = "gelu"

    def f(self, x: Floats) -> Floats:
        return x * _normal_distribution(x)


class GeluBackward(_ActivationBackward):
    """dy * (Phi(x) + x * phi(x)), phi the normal density."""

    name = "gelu_backward"

    def derivative(self, x: Floats) -> Floats:
        density = np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return _normal_distribution(x) + x * density


_GELU_A = math.sqrt(2.0 / math.pi)
_GELU_B = 0.044715


class GeluTanh(_Activation):
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))): the approximate GELU of GPT-2 and Gemma."""

    name = "gelu_tanh"

    def f(self, x: Floats) -> Floats:
        return 0.5 * x * (1.0 + np.tanh(_GELU_A * (x + _GELU_B * x * x * x)))


class GeluTanhBackward(_ActivationBackward):
    """The derivative of ``gelu_tanh`` times dy."""

    name = "gelu_tanh_backward"

    def derivative(self, x: Floats) -> Floats:
        t = np.tanh(_GELU_A * (x + _GELU_B * x * x * x))
        inner = _GELU_A * (1.0 + 3.0 * _GELU_B * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


class Relu(_Activation):
    """max(x, 0)."""

    name = "relu"
    flops = 1

    def f(self, x: Floats) -> Floats:
        return np.maximum(x, 0.0)


class ReluBackward(_ActivationBackward):
    """dy where x > 0, else 0."""

    name = "relu_backward"
    flops = 1

    def derivative(self, x: Floats) -> Floats:
        return (x > 0.0).astype(np.float64)


class Tanh(_Activation):
    """tanh(x)."""

    name = "tanh"

    def f(self, x: Floats) -> Floats:
        return np.tanh(x)


class TanhBackward(_ActivationBackward):
    """dy * (1 - tanh(x)^2)."""

    name = "tanh_backward"

    def derivative(self, x: Floats) -> Floats:
        return 1.0 / np.cosh(x) ** 2
