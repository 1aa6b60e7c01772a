"""Scores of the next token at chosen positions: what sampling needs."""

from __future__ import annotations

from surogate.dsl import Batch, CausalLM, Tensor
from surogate.dsl.tensor import logits_at


def next_token(model: CausalLM, batch: Batch) -> Tensor:
    """Logits [T, vocabulary] where ``targets`` holds, in its first places, the positions that are asked for."""
    return logits_at(model(batch), model.head(batch), batch.targets)
