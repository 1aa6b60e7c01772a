"""Scores of the next token at chosen positions: what generation needs."""

from __future__ import annotations

from collections.abc import Callable

from surogate.dsl import Batch, CausalLM, Tensor, gather, linear, source


def next_token(count: int) -> Callable[[CausalLM, Batch], Tensor]:
    """Objective whose result is logits [count, vocabulary] at the positions in the input ``rows`` (int32 [count])."""

    def objective(model: CausalLM, batch: Batch) -> Tensor:
        hidden = model(batch)
        rows = source(batch.ids.graph, "rows", count)
        return linear(gather(hidden, rows), model.head(batch))

    return objective
