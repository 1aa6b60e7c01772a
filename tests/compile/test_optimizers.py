"""What optimizers keep of each weight, and that plans and states follow it."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from surogate.config.schema import TrainConfig
from surogate.models import architectures
from surogate.optim import make_optimizer, optimizers
from surogate.train.state import trained_state
from tests.support import make_runtime

CONFIG = {
    **architectures()["qwen3"].TINY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


def runtime_for(name: str, **options):
    optimizer = make_optimizer(name, **options)
    return make_runtime(CONFIG, batch=1, sequence_len=16, max_documents=2, threads=1, optimizer=optimizer)


def test_every_optimizer_can_be_configured() -> None:
    assert sorted(get_args(TrainConfig.model_fields["optim"].annotation)) == optimizers()
    with pytest.raises(KeyError, match="adamw"):
        make_optimizer("adamax")


@pytest.mark.parametrize("moments,size", [("f32", 8), ("bf16", 4)])
def test_memory_of_moments(moments: str, size: int) -> None:
    compiled = runtime_for("adamw", moments=moments).compiled
    slots = compiled.memory.slots
    trained = sum(-(-slots[n].type.numel // 64) * 64 for g in compiled.groups for n in g.slots)
    assert compiled.memory.table()["optimizer"] == size * trained


def test_eight_bits_are_for_large_matrices_and_keep_their_own_blocks() -> None:
    """A byte an element and four a block, twice; every weight's state is its own, packed with others or not."""
    runtime = runtime_for("adamw_8bit")
    compiled = runtime.compiled
    large = {n for g in compiled.groups if g.kind == "8bit" for n in g.slots}
    slots = compiled.memory.slots
    assert large == {n for g in compiled.groups for n in g.slots if len(slots[n].type.shape) > 1}
    elements = sum(slots[n].type.numel for n in large)
    small = sum(-(-slots[n].type.numel // 64) * 64 for g in compiled.groups if not g.kind for n in g.slots)
    padding = sum(-(elements // 256) % 64 for _ in range(2))
    assert (
        compiled.memory.table()["optimizer"]
        == 2 * elements + 8 * (elements // 256) + 4 * padding + 2 * 2048 + 8 * small
    )
    packed = [n for n, (whole, _, _) in compiled.memory.parts.items() if whole in large]
    assert any("k_proj" in n for n in packed)
    state = dict(trained_state(runtime))
    covered = np.zeros(compiled.memory.size("device"), np.int8)
    for name, weight in compiled.weights.items():
        kept = [state[f"{p}.{name}"] for p in ("adam_m", "adam_v")]
        assert [k.shape for k in kept] == [tuple(weight.ref.shape)] * 2
        if len(weight.ref.shape) > 1:
            n = kept[0].size
            assert kept[0].dtype == np.uint8
            assert [state[f"{p}.{name}"].shape for p in ("adam_m_absmax", "adam_v_absmax")] == [(n // 256,)] * 2
        for prefix in compiled.states:
            if f"{prefix}.{name}" in state:
                ref = compiled.memory.ref(f"{prefix}.{name}")
                assert not covered[ref.offset : ref.end].any()
                covered[ref.offset : ref.end] = 1


def test_small_and_odd_matrices_keep_float_moments() -> None:
    adamw8 = make_optimizer("adamw_8bit")
    assert adamw8.kind("w", [(64, 64)]) == "8bit"
    assert adamw8.kind("w", [(64, 60)]) == adamw8.kind("w", [(4096,)]) == adamw8.kind("w", [(65, 65)]) == ""
    assert adamw8.kind("w", [(64, 64), (32, 64)]) == ""
