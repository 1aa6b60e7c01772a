"""Tensors while a model is traced, and the operations on them."""

from __future__ import annotations

import numpy as np

from surogate.graph import Graph, Type, Value


class Tensor:
    """A value of the graph that is being traced. Shapes are static; the first dimension counts tokens."""

    __slots__ = ("graph", "value")

    def __init__(self, graph: Graph, value: Value) -> None:
        self.graph, self.value = graph, value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __add__(self, other: Tensor) -> Tensor:
        return _apply("add", self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return _apply("mul", self, other)
        return _apply("scale", self, alpha=float(other))

    __rmul__ = __mul__

    def reshape(self, *shape: int) -> Tensor:
        """The same elements under another shape; the first dimension (tokens) stays."""
        return _apply("reshape", self, shape=tuple(shape))

    def split(self, *sizes: int) -> tuple[Tensor, ...]:
        """Cut the last dimension into pieces of these sizes."""
        values = self.graph.emit("split", [self.value], sizes=tuple(sizes))
        return tuple(Tensor(self.graph, v) for v in values if v is not None)


def _apply(op: str, *operands: Tensor | None, **attrs: object) -> Tensor:
    graph = next(t.graph for t in operands if t is not None)
    return Tensor(graph, graph.one(op, [None if t is None else t.value for t in operands], **attrs))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _apply("silu", x)


def gelu(x: Tensor) -> Tensor:
    """The exact Gaussian error linear unit, x * Phi(x)."""
    return _apply("gelu", x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (``gelu_pytorch_tanh``, ``gelu_new``)."""
    return _apply("gelu_tanh", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return _apply("relu", x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return _apply("tanh", x)


def rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x[T,H,C] by its positions (Su et al. 2021), first half against second half as Hugging Face does."""
    return _apply("rope", x, table[0], table[1], inverse=False)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, window: int = 0) -> Tensor:
    """Causal attention inside each document.

    Args:
        q: [T, heads, head_dim].
        k, v: [T, kv_heads, head_dim]; heads is a multiple of kv_heads.
        cu_seqlens: document boundaries, int32.
        scale: factor on q.k, usually head_dim ** -0.5.
        window: how many positions a token sees, itself included; 0: all before it.

    Returns:
        [T, heads, head_dim].
    """
    return _apply("attention", q, k, v, cu_seqlens, scale=float(scale), window=int(window))


def lm_head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of hidden[T,D] @ weight[V,D].T against targets (negative: no target), f64[1]."""
    return _apply("lm_head_loss", hidden, weight, targets, None)


def constant(graph: Graph, name: str, array: np.ndarray) -> Tensor:
    """Numbers that are fixed when the model is traced, stored as float32."""
    found = graph.find(name)
    if found is None:
        data = np.ascontiguousarray(array, np.float32)
        found = graph.source(name, Type(data.shape), "const")
        graph.constants[name] = data
    return Tensor(graph, found)


def source(graph: Graph, name: str, length: int) -> Tensor:
    """An int32 input of the program beside the batch."""
    return Tensor(graph, graph.source(name, Type((length,), "i32"), "input"))


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x[T,D] by index: [len(rows), D]."""
    return _apply("embedding", x, rows, dtype=x.value.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x[M,K] @ weight[N,K].T, for a weight that belongs to another module (a tied head)."""
    return _apply("matmul", x, weight, None, None, ta=False, tb=True, alpha=1.0)
