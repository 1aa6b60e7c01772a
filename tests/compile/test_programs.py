"""Compiled programs, run by NumPy references over a real arena, against transformers: what is wrong here is the
compiler's, not the kernels'. And the shapes of what the passes make."""

from __future__ import annotations

import time

import numpy as np
import pytest

from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import Compiled, CompileOptions, compile_model
from surogate.errors import UserError
from surogate.graph import Graph, GraphError, Type
from surogate.models import architectures, build
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from tests.models.test_parity import documents, reference, torch_loss
from tests.reference_engine import ReferenceEngine
from tests.support import Rows, relative

QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def compiled(config: dict, **changes: object) -> Compiled:
    options = {
        "batch": 2, "sequence_len": 24, "max_documents": 6, "recipe": get_recipe("fp32"), "optimizer": AdamW(),
    } | changes  # fmt: skip
    return compile_model(build(config), CompileOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", list(architectures()))
@pytest.mark.parametrize("recompute", ["off", "selective", "block"])
def test_gradients(model_type: str, recompute: str) -> None:
    config = architectures()[model_type].TINY
    model = reference(config).double()
    rng = np.random.default_rng(0)
    sequences = [documents(rng, config["vocab_size"], n) for n in ([13, 6], [21])]
    total, count = torch_loss(model, [d for s in sequences for d in s])
    (total / count).backward()
    c = compiled(config, recompute=recompute)
    engine = ReferenceEngine(c)
    for name, p in model.named_parameters():
        engine.slot(name)[...] = p.detach().numpy()
    for name, value in Rows(sequences, 24).arrays(6).items():
        engine.symbol("micro_step", name)[...] = value
    engine.symbol("micro_step", "loss_scale")[...] = 0.5 / count
    engine.run("micro_step")
    engine.run("micro_step")  # gradients of two halves add up
    assert engine.slot("loss")[0] == pytest.approx(2 * float(total.detach()), rel=1e-6)
    for name, p in model.named_parameters():
        assert relative(engine.slot(f"grad.{name}"), p.grad.numpy()) < 1e-5, name


def test_eval_step_gives_the_loss_of_the_training_step() -> None:
    config = architectures()["qwen2"].TINY
    c = compiled(config, eval_batch=2, eval_documents=6, lora=LoraOptions(rank=2))
    engine = ReferenceEngine(c)
    rng = np.random.default_rng(0)
    for name in c.weights:
        engine.slot(name)[...] = rng.normal(size=engine.slot(name).shape) * 0.2
    rows = Rows([documents(rng, config["vocab_size"], n) for n in ([13, 6], [21])], 24).arrays(6)
    losses = []
    for program in ("micro_step", "eval_step"):
        for name, value in rows.items():
            engine.symbol(program, name)[...] = value
        engine.slot("loss")[...] = 0
        engine.run(program)
        losses.append(float(engine.slot("loss")[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_packing_and_fusion() -> None:
    """q, k, v share one product, gate and up another; norms take the residual sum in; SwiGLU is one op."""
    c = compiled(architectures()["llama"].TINY)
    ops = [i.op for i in c.programs["micro_step"].instructions if i.phase == "forward"]
    layers = 3
    assert ops.count("matmul") == 4 * layers
    assert ops.count("swiglu") == layers and "silu" not in ops and "mul" not in ops
    assert ops.count("add_rmsnorm") == 2 * layers and ops.count("rmsnorm") == 1
    assert "copy" not in [i.op for p in c.programs.values() for i in p.instructions]
    assert "add" not in [i.op for i in c.programs["micro_step"].instructions]  # every sum of gradients is fused


def test_norm_and_rotation_of_q_and_k_are_one_op() -> None:
    programs = compiled(architectures()["qwen3"].TINY, eval_batch=1, eval_documents=3).programs
    ops = {n: [(i.op, i.phase) for i in p.instructions] for n, p in programs.items()}
    for name in ("micro_step", "eval_step"):
        assert ops[name].count(("qk_norm_rope", "forward")) == 3
        assert "rope" not in [op for op, _ in ops[name]]
        assert ops[name].count(("rmsnorm", "forward")) == 1  # that of the first layer's input
    assert ops["micro_step"].count(("qk_norm_rope_backward", "backward")) == 3
    wide = {**architectures()["qwen3"].TINY, "head_dim": 258}  # beyond the kernels
    assert "rope" in [i.op for i in compiled(wide).programs["micro_step"].instructions]


def test_lora_programs_have_no_copies_and_no_sums() -> None:
    c = compiled(architectures()["llama"].TINY, lora=LoraOptions(rank=2))
    ops = [i.op for i in c.programs["micro_step"].instructions]
    assert "copy" not in ops and "add" not in ops
    assert len(c.programs["optimizer_step"].instructions) == 1


def test_frozen_weights_get_no_gradient() -> None:
    c = compiled(architectures()["llama"].TINY, lora=LoraOptions(rank=2))
    gradients = [s for s in c.memory.slots if s.startswith("grad.")]
    assert gradients and all("lora_" in s for s in gradients)


def test_recompute_needs_less_memory_and_more_work() -> None:
    sizes, work = [], []
    for mode in ("off", "selective", "block"):
        c = compiled({**architectures()["llama"].TINY, "num_hidden_layers": 8}, recompute=mode)
        sizes.append(c.memory.temporary)
        work.append(c.programs["micro_step"].flops)
    assert sizes[0] > sizes[1] > sizes[2]
    assert work[0] < work[1] < work[2]


def test_same_input_same_program() -> None:
    config = architectures()["qwen3"].TINY
    assert compiled(config).digest == compiled(config).digest
    assert compiled(config).digest != compiled(config, recompute="block").digest


def test_an_8b_model_compiles_fast() -> None:
    """36 layers of Qwen3-8B, LoRA on every linear layer: under 5 seconds, of which most is safety checks."""
    started = time.process_time()  # the machine may be busy
    c = compiled(QWEN3_8B, batch=2, sequence_len=2048, max_documents=256, lora=LoraOptions(), recompute="block")
    assert time.process_time() - started < 5
    assert c.parameters - c.trainable_parameters == 8_190_735_360  # as published for Qwen3-8B


def test_unknown_lora_target_lists_what_exists() -> None:
    with pytest.raises(UserError, match="'qq_proj'") as caught:
        compiled(architectures()["llama"].TINY, lora=LoraOptions(targets=("q_proj", "qq_proj")))
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(caught.value)


def test_unknown_architecture_lists_the_known_and_points_to_the_page() -> None:
    with pytest.raises(UserError) as caught:
        build({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in str(caught.value) and "LlamaForCausalLM" in str(caught.value)
    assert "docs/adding-a-model.md" in str(caught.value)


def test_verify_finds_a_read_after_overwriting() -> None:
    g = Graph("bad")
    x = g.source("x", Type((4, 8)), "input")
    w = g.source("w", Type((8, 8)), "param")
    y = g.one("matmul", [x, w, None, None], ta=False, tb=True, alpha=1.0)
    z = g.one("matmul", [x, w, None, y], ta=False, tb=True, alpha=1.0)  # takes y's storage
    g.outputs = [g.one("add", [y, z])]
    with pytest.raises(GraphError, match="overwritten"):
        g.verify()
