"""Tracing: a model and an objective become a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surogate.dsl.nn import Module
from surogate.dsl.tensor import Tensor
from surogate.graph import Graph, Type


@dataclass(frozen=True)
class Batch:
    """A micro-batch: a flat run of T = batch x sequence_len tokens.

    ``ids``, ``targets`` (-100: none) and ``positions``: int32 [T]. ``cu_seqlens``: int32 [max_documents + 1],
    boundaries of documents in the flat run, filled up with T.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor


class CausalLM(Module):
    """What an objective needs of a decoder: final hidden states, and the head's weight."""

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        raise NotImplementedError

    def head(self, batch: Batch) -> Tensor:
        """The LM head's weight [vocabulary, hidden]; with tied embeddings, the embedding's."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Tensor:
        return self.forward(batch)


def trace(
    model: CausalLM,
    objective: Callable[[CausalLM, Batch], Tensor],
    *,
    tokens: int,
    max_documents: int,
    name: str,
    activation: str = "f32",
) -> Graph:
    """Run ``objective`` on symbolic inputs and return the graph, whose first output is what it returned.

    ``activation``: dtype in which activations are stored, f32 or bf16.
    """
    g = Graph(name)
    g.activation = activation
    model.bind()

    def ids(what: str, n: int) -> Tensor:
        return Tensor(g, g.source(what, Type((n,), "i32"), "input"))

    batch = Batch(
        ids("ids", tokens), ids("targets", tokens), ids("positions", tokens), ids("cu_seqlens", max_documents + 1)
    )
    g.outputs = [objective(model, batch).value]
    g.prune()
    g.verify()
    return g
