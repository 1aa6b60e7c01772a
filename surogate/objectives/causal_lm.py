"""Causal language modelling: the sum of next-token cross-entropies over the targets of a micro-batch."""

from __future__ import annotations

from surogate.dsl import Batch, CausalLM, Tensor, lm_head_loss


def causal_lm(model: CausalLM, batch: Batch) -> Tensor:
    """Sum (not mean) of token losses, f64[1]; the step divides by the targets of the whole global batch."""
    return lm_head_loss(model(batch), model.head(batch), batch.targets)
