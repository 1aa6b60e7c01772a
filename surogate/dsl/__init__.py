"""What an author of a model sees: modules, parameters and operations on tensors.

A model is ordinary-looking Python that states mathematics only::

    class MLP(Module):
        def __init__(self, hidden: int, inner: int) -> None:
            self.gate_proj = Linear(hidden, inner)
            self.up_proj = Linear(hidden, inner)
            self.down_proj = Linear(inner, hidden)

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))

Attribute names spell the Hugging Face weight names. Packing, fusion, adapters, gradients and memory are the
compiler's business.
"""

from surogate.dsl.nn import Embedding, Layers, Linear, Module, Param, RMSNorm
from surogate.dsl.rope import RopeTable, rope_frequencies
from surogate.dsl.tensor import (
    Tensor,
    attention,
    constant,
    gather,
    gelu,
    gelu_tanh,
    linear,
    lm_head_loss,
    relu,
    rope,
    silu,
    source,
    tanh,
)
from surogate.dsl.trace import Batch, CausalLM, trace

__all__ = [
    "Batch",
    "CausalLM",
    "Embedding",
    "Layers",
    "Linear",
    "Module",
    "Param",
    "RMSNorm",
    "RopeTable",
    "Tensor",
    "attention",
    "constant",
    "gather",
    "gelu",
    "gelu_tanh",
    "linear",
    "lm_head_loss",
    "relu",
    "rope",
    "rope_frequencies",
    "silu",
    "source",
    "tanh",
    "trace",
]
