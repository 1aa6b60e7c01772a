"""``deterministic``, ``debug`` and the memory plan on whole models: same bits twice, in graphs and eagerly; a NaN named
by its layer; no memory beside the plan but the libraries'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate import cuda
from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.errors import TrainingFailed
from surogate.models import build
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from surogate.train.runtime import Runtime
from tests.gpu.test_models import config_of, feeder
from tests.train.support import config_for, same_files, train, write_model, write_rows

BATCH, LENGTH, STEPS = 2, 64, 5


def _runtime(gpu: cuda.Gpu, arguments: dict, *, lora: bool = False, deterministic: bool = True) -> Runtime:
    options = CompileOptions(
        BATCH, LENGTH, 8, get_recipe("bf16"), lora=LoraOptions(rank=8, dropout=0.1) if lora else None,
        optimizer=AdamW(), recompute="selective", device="cuda", sm=gpu.sm, deterministic=deterministic,
    )  # fmt: skip
    r = Runtime(compile_model(build(config_of("qwen3")), options), 1, arguments)
    rng = np.random.default_rng(0)
    for weight in r.compiled.weights.values():
        values = (rng.normal(size=weight.ref.shape) * 0.1 + (len(weight.ref.shape) == 1)).astype(np.float32)
        r.write(weight.ref, (values.view(np.uint32) >> 16).astype(np.uint16))
    return r


def _steps(r: Runtime, folder: Path) -> tuple[list[dict], bytes]:
    feed = feeder(folder, config_of("qwen3")["vocab_size"], STEPS * BATCH * 2)
    found = []
    for step in range(1, STEPS + 1):
        scalars = {"lr": 1e-2, "bias_correction1": 1 - 0.9**step, "bias_correction2": 1 - 0.999**step}
        found.append(r.train_step(feed, 2, scalars, 3, step))
    return found, b"".join(r.read(w.ref).tobytes() for w in r.compiled.weights.values())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_deterministic_runs_have_the_same_bits(gpu: cuda.Gpu, arguments, tmp_path, lora) -> None:
    """Twice on graphs, and eagerly, each with an empty cache of algorithms."""
    if gpu.sm // 10 in (8, 12):
        pytest.skip("cuDNN has no deterministic backward pass of packed attention on this architecture")
    runs = []
    for index, eager in enumerate((False, False, True)):
        given = arguments(tune=False, eager=eager, cache_dir=tmp_path / f"cache{index}")
        history, weights = _steps(_runtime(gpu, given, lora=lora), tmp_path)
        runs.append(([(h["loss"], h["grad_norm"]) for h in history], weights))
    assert runs[0] == runs[1]
    assert runs[0] == runs[2]


def test_without_it_the_forward_pass_has_the_same_bits(gpu: cuda.Gpu, arguments, tmp_path) -> None:
    """The backward pass of attention alone may differ, so the first loss is the same."""
    first = [
        _steps(_runtime(gpu, arguments(tune=False, eager=e), deterministic=False), tmp_path)[0][0]["loss"]
        for e in (False, True)
    ]
    assert first[0] == first[1]


def test_runs_of_the_command_repeat(gpu: cuda.Gpu, tmp_path) -> None:
    if gpu.sm // 10 in (8, 12):
        pytest.skip("cuDNN has no deterministic backward pass of packed attention on this architecture")
    pytest.importorskip("transformers")
    model = write_model(tmp_path / "model", "qwen3", dtype="bfloat16", head_dim=16, intermediate_size=96)
    rows = write_rows(tmp_path / "rows.jsonl", 16)
    found = [
        train(config_for(tmp_path / name, model, rows, device="cuda", deterministic=True, max_steps=6, debug=debug))
        for name, debug in (("a", "off"), ("b", "off"), ("c", "eager"), ("d", "check_nan"))
    ]
    for other in found[1:]:
        assert [h["loss"] for h in found[0].history] == [h["loss"] for h in other.history]
        assert same_files(found[0].result, other.result)


def test_a_nan_is_traced_to_its_layer(gpu: cuda.Gpu, arguments, tmp_path) -> None:
    r = _runtime(gpu, arguments(tune=False, check_nan=True), deterministic=False)
    name = "model.layers.1.mlp.down_proj.weight"
    bits = r.read(r.compiled.weights[name].ref)
    bits[3, 5] = 0x7FC0
    r.write(r.compiled.weights[name].ref, bits)
    with pytest.raises(TrainingFailed, match=r"matmul of model\.layers\.1\.mlp\.down_proj, forward pass"):
        _steps(r, tmp_path)


def test_nothing_is_taken_beside_the_plan(gpu: cuda.Gpu, arguments, tmp_path) -> None:
    """Context and libraries are there before (a small run loads them); what a larger run takes then is its plan, in
    pieces of 2 MiB, and room for graphs and for kernels that are loaded when first used."""
    warm = _runtime(gpu, arguments(tune=False))
    _steps(warm, tmp_path)
    config = {**config_of("qwen3"), "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
              "vocab_size": 32000}  # fmt: skip
    options = CompileOptions(4, 512, 8, get_recipe("bf16"), optimizer=AdamW(), device="cuda", sm=gpu.sm)
    compiled = compile_model(build(config), options)
    plan = compiled.memory.size("device")
    before, _ = cuda.memory(0)
    r = Runtime(compiled, 1, arguments(tune=False))
    empty = np.random.default_rng(0)
    ids = empty.integers(0, 32000, 2048).astype(np.int32)
    symbols = compiled.programs["micro_step"].symbols
    r.write(symbols["ids"], ids)
    r.write(symbols["targets"], ids)
    r.write(symbols["cu_seqlens"], np.minimum(np.arange(9) * 512, 2048).astype(np.int32))
    for _ in range(3):  # eagerly, captured, replayed
        r.engine.run("micro_step")
    r.engine.read("device", 0, 1)
    taken = before - cuda.memory(0)[0]
    assert r.engine.allocated() == {"device": plan}
    assert plan > 500 << 20
    assert plan <= taken <= plan + (128 << 20), f"plan {plan}, taken {taken}"
