"""Fifty steps of a model of SmolLM2-135M's shape in bf16, beside transformers in bf16 on the same GPU.

Its weights are random (a fixed seed): GPU machines of tests have no network, and 270 MB are too many to carry. The
tokens come from a random Markov chain, so that there is something to learn from the first step on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from surogate import cuda
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.models import build
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from surogate.train.runtime import Runtime

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "initializer_range": 0.041666666666666664,
}  # fmt: skip
BATCH, LENGTH, STEPS = 4, 512, 50
WARM = 5  # steps over which the learning rate rises, and that are left out of the comparison
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.95, 1e-8


def tokens(vocabulary: int, steps: int) -> np.ndarray:
    """[steps, BATCH, LENGTH]: every token is followed by one of four, with unequal chances."""
    rng = np.random.default_rng(0)
    known = min(vocabulary, 2000)
    follows = rng.integers(0, known, (known, 4))
    found = np.empty((steps, BATCH, LENGTH), np.int64)
    now = rng.integers(0, known, (steps, BATCH))
    choice = rng.choice(4, p=[0.6, 0.2, 0.15, 0.05], size=(steps, BATCH, LENGTH))
    for i in range(LENGTH):
        found[:, :, i] = now
        now = follows[now, choice[:, :, i]]
    return found


def learning_rate(step: int) -> float:
    return RATE * min(1.0, step / WARM)


def ours(config: dict[str, Any], weights: dict[str, np.ndarray], data: np.ndarray, gpu: Any, sm: int) -> list[float]:
    optimizer = AdamW(BETA1, BETA2, EPSILON, 0.0, 1.0)
    options = CompileOptions(
        BATCH, LENGTH, BATCH, get_recipe("bf16" if gpu else "fp32"), optimizer=optimizer,
        device="cuda" if gpu else "cpu", sm=sm,
    )  # fmt: skip
    r = Runtime(compile_model(build(config), options), 1, gpu)
    for name, weight in r.compiled.weights.items():
        bits = (weights[name].view(np.uint32) >> 16).astype(np.uint16)
        r.write(weight.ref, bits if weight.ref.dtype == "bf16" else weights[name])
        if f"master.{name}" in r.compiled.memory.slots or f"master.{name}" in r.compiled.memory.parts:
            r.write(r.compiled.memory.ref(f"master.{name}"), weights[name])
    symbols = r.compiled.programs["micro_step"].symbols
    count = BATCH * (LENGTH - 1)
    losses = []
    for step, ids in enumerate(data, start=1):
        targets = np.concatenate([ids[:, 1:], np.full((BATCH, 1), -100)], axis=1)
        values = {
            "ids": ids, "targets": targets, "positions": np.tile(np.arange(LENGTH), BATCH),
            "cu_seqlens": np.arange(BATCH + 1) * LENGTH,
        }  # fmt: skip
        for name, value in values.items():
            r.write(symbols[name], value.astype(np.int32).reshape(-1))
        r.write(symbols["loss_scale"], np.array([1.0 / count], np.float32))
        r.write(symbols["loss"], np.zeros(1))
        r.engine.run("micro_step")
        losses.append(float(r.read(symbols["loss"])[0]) / count)
        r.engine.run("norm_step")
        scalars = {
            "lr": learning_rate(step), "bias_correction1": 1 - BETA1**step, "bias_correction2": 1 - BETA2**step,
        }  # fmt: skip
        for name, x in scalars.items():
            r.write(r.compiled.programs["optimizer_step"].symbols[name], np.array([x], np.float32))
        r.engine.run("optimizer_step")
    return losses


def theirs(model: Any, data: np.ndarray, device: str) -> list[float]:
    """fp32 weights under bf16 autocast, which is what bf16 weights with fp32 masters are."""
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (BETA1, BETA2), EPSILON, 0.0)
    losses = []
    for step, ids in enumerate(data, start=1):
        batch = torch.from_numpy(ids).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(config: dict[str, Any], gpu: Any = None, sm: int = 0, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Loss curves of both from the same weights, which bf16 holds exactly."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    data = tokens(config["vocab_size"], steps)
    a = ours(config, weights, data, gpu, sm)
    b = theirs(model, data, "cuda" if gpu else "cpu")
    return np.array(a), np.array(b)


def test_fifty_steps_in_bf16_follow_transformers(gpu: cuda.Gpu, arguments) -> None:
    a, b = compare(SMOLLM2, arguments(tune=False), gpu.sm)
    assert b[-5:].mean() < 0.8 * b[:5].mean()  # it learns
    apart = np.abs(a - b)[WARM:] / b[WARM:]
    report = (
        f"largest {apart.max():.3%} at step {WARM + 1 + int(apart.argmax())}, ours {a.round(3)}, theirs {b.round(3)}"
    )
    assert apart.max() < 0.01, report
    assert abs(a[WARM:].mean() / b[WARM:].mean() - 1) < 0.002, report
