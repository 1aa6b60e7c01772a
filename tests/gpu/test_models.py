"""Whole models on the GPU: against the CPU engine, graphs against eager mode, and training that goes down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate import _native, cuda
from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.models import architectures, build
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from surogate.train.quantized import load_quantized
from surogate.train.runtime import Runtime
from tests.native.test_feeder import write_shard
from tests.support import gradient, micro_step, relative

LENGTH, BATCH = 64, 2


def config_of(model_type: str) -> dict:
    """Sizes that cuDNN takes: heads of 16, rows in whole packs."""
    return {
        **architectures()[model_type].TINY, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 96, "vocab_size": 136,
    }  # fmt: skip


class Drawn:
    """A checkpoint of one weight."""

    def __init__(self, values: np.ndarray, bits: np.ndarray) -> None:
        self.values, self.bits = values, bits

    def read_into(self, name: str, destination: np.ndarray, dtype: str) -> None:
        destination[...] = self.bits if dtype == "bf16" else self.values


def runtime(
    config: dict, gpu=None, sm: int = 0, recipe: str = "fp32", lora=None, recompute="off", quantization="off"
) -> Runtime:
    device = "cpu" if gpu is None else "cuda"
    options = CompileOptions(
        BATCH, LENGTH, 8, get_recipe(recipe), BATCH, 8, lora, AdamW(), recompute, 2, device=device, sm=sm,
        quantization=quantization,
    )  # fmt: skip
    r = Runtime(compile_model(build(config), options), 2, gpu)
    rng = np.random.default_rng(0)
    for name, weight in r.compiled.weights.items():
        values = (rng.normal(size=weight.shape) * 0.1 + (len(weight.shape) == 1)).astype(np.float32)
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)  # what bf16 holds exactly
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        if weight.quantized is not None:
            load_quantized(r, weight.quantized, name, Drawn(values, bits), "drawn")  # type: ignore[arg-type]
            continue
        r.write(weight.ref, bits if weight.ref.dtype == "bf16" else values)
        master = f"master.{name}"
        if master in r.compiled.memory.slots or master in r.compiled.memory.parts:
            r.write(r.compiled.memory.ref(master), values)
    return r


def batch(vocabulary: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    bounds = [0, 30, 64, 75, 128]
    ids = rng.integers(1, vocabulary, 128)
    targets = np.append(ids[1:], -100)
    targets[[b - 1 for b in bounds[1:]]] = -100
    positions = np.concatenate([np.arange(b - a) for a, b in zip(bounds[:-1], bounds[1:], strict=True)])
    cu = bounds + [128] * (9 - len(bounds))
    arrays = {"ids": ids, "targets": targets, "positions": positions, "cu_seqlens": np.array(cu)}
    return {n: v.astype(np.int32) for n, v in arrays.items()}


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=8)], ids=["full", "lora"])
@pytest.mark.parametrize("model_type", list(architectures()))
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_loss_and_gradients_are_those_of_the_cpu(gpu: cuda.Gpu, arguments, recipe, model_type, lora) -> None:
    check_gradients(gpu, arguments, recipe, model_type, lora)


@pytest.mark.parametrize("recompute", ["off", "block"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_four_bit_weights_are_those_of_the_cpu(gpu: cuda.Gpu, arguments, recipe, recompute) -> None:
    check_gradients(gpu, arguments, recipe, "qwen3", LoraOptions(rank=8), recompute, "nf4")


def check_gradients(gpu, arguments, recipe, model_type, lora, recompute="off", quantization="off") -> None:
    config = config_of(model_type)
    ours = runtime(config, arguments(tune=False), gpu.sm, recipe, lora, recompute, quantization)
    reference = runtime(config, lora=lora, quantization=quantization)
    data = batch(config["vocab_size"])
    losses = [micro_step(r, data, 0.01) for r in (ours, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if recipe == "fp32" else 1e-2)
    trained = [n for n, w in reference.compiled.weights.items() if w.trainable]
    largest = max(float(np.linalg.norm(gradient(reference, n))) for n in trained)
    for name in trained:
        a, b = gradient(ours, name), gradient(reference, name)
        # Some gradients are sums that all but vanish (a bias of k moves no softmax): there only noise is left.
        close = relative(a, b) < (1e-4 if recipe == "fp32" else 6e-2)
        assert close or np.linalg.norm(a - b) < (1e-6 if recipe == "fp32" else 1e-2) * largest, name


def feeder(folder: Path, vocabulary: int, rows: int) -> _native.Feeder:
    rng = np.random.default_rng(2)
    tokens = np.tile(rng.integers(1, vocabulary, LENGTH), rows)
    files = write_shard(folder, tokens, np.ones(tokens.size))
    pieces = np.array([[i * LENGTH, LENGTH, 0] for i in range(rows)], np.int64)
    return _native.Feeder(*files, pieces, np.arange(rows + 1, dtype=np.int64), BATCH, LENGTH, 8, 0)


def steps(r: Runtime, folder: Path, vocabulary: int, count: int = 12, lr: float = 1e-2) -> list[dict]:
    feed = feeder(folder, vocabulary, count * BATCH * 2)
    found = []
    for step in range(1, count + 1):
        scalars = {"lr": lr, "bias_correction1": 1 - 0.9**step, "bias_correction2": 1 - 0.999**step}
        found.append(r.train_step(feed, 2, scalars, 3, step))
    return found


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=8, dropout=0.1)], ids=["full", "lora"])
def test_training_on_graphs(gpu: cuda.Gpu, arguments, tmp_path, lora) -> None:
    """The loss of one repeated row falls, as it does on the CPU."""
    config = config_of("qwen3")
    history = steps(runtime(config, arguments(tune=False), gpu.sm, "bf16", lora), tmp_path, 136)
    reference = steps(runtime(config, lora=lora), tmp_path, 136)
    assert all(h["applied"] for h in history)
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    for ours, theirs in zip(history[:6], reference[:6], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.1)
        assert ours["targets"] == theirs["targets"]


@pytest.mark.parametrize("recompute", ["off", "selective", "block"])
def test_graphs_and_eager_agree_in_f32(gpu: cuda.Gpu, arguments, tmp_path, recompute) -> None:
    """Bitwise: f32 takes attention kernels that are deterministic."""
    config = config_of("llama")
    found = []
    for eager, mode in ((False, recompute), (True, "off")):
        r = runtime(config, arguments(tune=False, eager=eager), gpu.sm, "fp32", None, mode)
        found.append([h["loss"] for h in steps(r, tmp_path, 136, 6)])
    assert found[0] == found[1]


def test_memory_is_what_the_plan_says(gpu: cuda.Gpu, arguments) -> None:
    r = runtime(config_of("llama"), arguments(), gpu.sm, "bf16")
    assert r.engine.allocated() == {"device": r.compiled.memory.size("device")}
