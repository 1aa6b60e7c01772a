"""A real model: loss, and twenty steps of training, beside transformers and PEFT on torch, float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surogate import _native
from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.data.tokenizer import Tokenizer
from surogate.io.config_json import read_model_config
from surogate.io.weights import open_weights
from surogate.models import build
from surogate.optim.adamw import AdamW
from surogate.recipes import get_recipe
from surogate.train.runtime import Runtime
from surogate.train.schedule import Schedule
from surogate.train.setup import ModelFiles, load_weights
from tests.native.test_feeder import write_shard

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = Path(__file__).parents[2] / "LICENSE"
LENGTH, BATCH, STEPS = 32, 2, 20


def runtime_of(
    folder: Path, *, batch: int, length: int, lora: LoraOptions | None = None, train: bool = True
) -> Runtime:
    options = CompileOptions(
        batch, length, batch, get_recipe("fp32"), batch, batch, lora,
        AdamW(weight_decay=0.01, max_grad_norm=1.0), threads=1, train=train,
    )  # fmt: skip
    files = ModelFiles(str(folder), folder, read_model_config(folder), open_weights(folder))
    # The oracle holds every weight in float32, so ours does too: not the bf16 of the file.
    runtime = Runtime(compile_model(build(files.config), options), 1)
    load_weights(runtime, files, seed=0)
    return runtime


def token_rows(folder: Path, rows: int, length: int) -> np.ndarray:
    ids = Tokenizer.load(folder).encode(TEXT.read_text()).ids[: rows * length]
    return np.array(ids, np.int32).reshape(rows, length)


def feeder(folder: Path, tokens: np.ndarray, batch: int) -> _native.Feeder:
    rows, length = tokens.shape
    files = write_shard(folder, tokens.reshape(-1), np.ones(tokens.size))
    pieces = np.array([[i * length, length, 0] for i in range(rows)], np.int64)
    return _native.Feeder(*files, pieces, np.arange(rows + 1, dtype=np.int64), batch, length, batch, 0)


def oracle(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    return model


def test_loss_on_real_text(smollm2: Path, tmp_path: Path) -> None:
    tokens = token_rows(smollm2, 2, 256)
    runtime = runtime_of(smollm2, batch=2, length=256, train=False)
    result = runtime.evaluate(feeder(tmp_path, tokens, 2), 1)
    with torch.no_grad():
        ids = torch.tensor(tokens, dtype=torch.long)
        expected = float(oracle(smollm2)(input_ids=ids, labels=ids).loss)
    assert result["loss_sum"] / result["targets"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_twenty_steps_follow_torch(smollm2: Path, tmp_path: Path, mode: str) -> None:
    """AdamW with warm-up, linear decay, weight decay and clipping; every step's loss within 1e-3 relative."""
    peak = 3e-5 if mode == "full" else 1e-3
    tokens = token_rows(smollm2, BATCH * STEPS, LENGTH)
    options = LoraOptions(rank=8, alpha=16.0) if mode == "lora" else None
    runtime = runtime_of(smollm2, batch=BATCH, length=LENGTH, lora=options)

    model = oracle(smollm2)
    if mode == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    ours = name.removeprefix("base_model.model.").replace(".default", "")
                    p.copy_(torch.from_numpy(runtime.array(ours).copy()))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, fused=True)
    scheduler = transformers.get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    schedule = Schedule("linear", peak, STEPS, 3)

    feed = feeder(tmp_path, tokens, BATCH)
    losses = []
    for step in range(1, STEPS + 1):
        scalars = {
            "lr": schedule.at(step), "bias_correction1": 1 - 0.9**step, "bias_correction2": 1 - 0.999**step,
        }  # fmt: skip
        ours = runtime.train_step(feed, 1, scalars, 0, step)
        ids = torch.tensor(tokens[(step - 1) * BATCH : step * BATCH], dtype=torch.long)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        losses.append((ours["loss"], loss.item()))
        assert ours["loss"] == pytest.approx(loss.item(), rel=1e-3), f"step {step}: {losses}"
        assert ours["grad_norm"] == pytest.approx(float(norm), rel=5e-3)
    assert losses[-1][0] != pytest.approx(losses[0][0], rel=1e-3)
