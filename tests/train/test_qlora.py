"""QLoRA: runs beside PEFT over a model that bitsandbytes has quantised; memory; recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.models import architectures, build
from surogate.ops import nf4
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from surogate.train.runtime import Runtime
from tests.support import gradient, micro_step
from tests.train.support import config_for, train, weights_of, write_model, write_rows
from tests.train.test_oracle import RUN, by_torch, first_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes")


def theirs(weight: Any) -> Any:
    """The weight after bitsandbytes' NF4 with double quantisation. Magnitudes are quantised by its exact search, for
    which it takes other dtypes than float32, and its mean is ours up to the order of the sum."""
    codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    offset = state.absmax.mean()
    index, groups = torch.ops.bitsandbytes.quantize_blockwise(
        (state.absmax - offset).double(), bnb.functional.create_dynamic_map(), nf4.GROUP
    )
    state.absmax = bnb.functional.create_dynamic_map()[index.long()] * groups.repeat_interleave(256)[: index.numel()]
    state.absmax += offset
    return bnb.functional.dequantize_4bit(codes, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["off", "block"])
def test_a_run_follows_peft(tmp_path: Path, dtype: str, recompute: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    # Rows in whole blocks: of others bitsandbytes' CPU library (0.50.2) gives back other weights than it stored.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = write_model(tmp_path / "model", "qwen2", dtype=dtype, **sizes)
    config = config_for(
        tmp_path, source, rows, **RUN, lora=True, lora_rank=4, quantization="qlora_bnb", recompute=recompute
    )
    first = first_adapter(tmp_path, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(theirs(module.weight))
    targets = peft.LoraConfig(r=4, lora_alpha=32.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.float(), targets)
    peft.set_peft_model_state_dict(model, {n: torch.from_numpy(w) for n, w in first.items()})
    run = train({**config, "save_dtype": "float32"})
    expected = by_torch(model, config, len(run.history))
    assert len(expected) == len(run.history) >= 4
    for record, (loss, norm) in zip(run.history, expected, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-4), record["step"]
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-3), record["step"]
    adapted = peft.get_peft_model_state_dict(model)
    for name, weight in weights_of(run.result).items():
        assert np.abs(weight - adapted[name].detach().numpy()).max() < 1e-3, name


def compiled(quantization: str, recompute: str = "off", evaluate: bool = False):  # noqa: ANN201
    config = {**architectures()["llama"].TINY, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192}
    options = CompileOptions(
        2, 32, 4, get_recipe("bf16"), 2 if evaluate else 0, 4 if evaluate else 0, LoraOptions(4), AdamW(), recompute,
        quantization=quantization,
    )  # fmt: skip
    return compile_model(build(config), options)


def test_memory_is_the_plan_and_bits_are_few() -> None:
    plain, four = compiled("off"), compiled("nf4", evaluate=True)
    assert plain.parameters == four.parameters
    held = [w for w in four.weights.values() if w.quantized is not None]
    assert len(held) == 7 * len({w.name.split(".")[2] for w in held})
    for weight in held:
        parts = sum(four.memory.slots[s].type.nbytes for s in weight.quantized.slots)
        n = int(np.prod(weight.shape))
        assert parts == n // 2 + n // 64 + 4 * -(-n // 16384) + 4
    assert four.memory.table()["weights"] < plain.memory.table()["weights"]
    runtime = Runtime(four, 1)
    assert runtime.engine.allocated()["device"] == four.memory.size("device")


def test_recomputation_changes_no_bit() -> None:
    found = []
    for mode in ("off", "selective", "block"):
        runtime = Runtime(compiled("nf4", mode), 1)
        rng = np.random.default_rng(0)
        memory = runtime.compiled.memory
        for name, slot in memory.slots.items():
            if slot.purpose != "weights":
                continue
            if slot.type.dtype == "u8":
                values: Any = rng.integers(0, 256, slot.type.shape).astype(np.uint8)
            else:
                values = (rng.normal(size=slot.type.shape) * 0.1).astype(np.float32)
                values = (values.view(np.uint32) >> 16).astype(np.uint16) if slot.type.dtype == "bf16" else values
            runtime.write(memory.ref(name), values)
        ids = rng.integers(1, 64, 64).astype(np.int32)
        arrays = {
            "ids": ids, "targets": np.append(ids[1:], -100).astype(np.int32),
            "positions": np.tile(np.arange(32, dtype=np.int32), 2),
            "cu_seqlens": np.array([0, 32, 64, 64, 64], np.int32),
        }  # fmt: skip
        loss = micro_step(runtime, arrays, 0.01)
        names = [n for n, w in runtime.compiled.weights.items() if w.trainable]
        found.append((loss, [gradient(runtime, n) for n in names]))
        programs = runtime.compiled.programs["micro_step"].instructions
        assert {i.phase for i in programs if i.op == "dequantize_nf4"} == {"forward", "recompute"}
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert all(np.array_equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))
