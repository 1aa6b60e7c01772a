"""Whole runs beside PyTorch: every key of optimizer, schedule and adapters does what it says, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.config import make_config
from surogate.train.order import training_order
from surogate.train.setup import prepare_data
from tests.train.support import config_for, train, weights_of, write_model, write_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RUN = {
    "gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 2e-2, "adam_beta1": 0.7,
    "adam_beta2": 0.95, "adam_epsilon": 1e-4, "weight_decay": 0.2, "max_grad_norm": 0.5, "warmup_steps": 2,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine, no clipping": {"lr_scheduler_type": "cosine", "max_grad_norm": 0.0, "learning_rate": 5e-3},
    "wsd, bf16 file": {"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.5, "dtype": "bfloat16"},
    "lora": {"lora": True, "lora_rank": 4, "lora_alpha": 6.0},
    "rslora on some": {"lora": True, "lora_rank": 3, "use_rslora": True, "lora_target_modules": ["q_proj", "up_proj"]},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 18)


def batches(config: dict[str, Any]) -> list[list[tuple[Any, Any]]]:
    """(ids, labels) of the rows of every step, in the order of the run."""
    parsed = make_config(config)
    shard = prepare_data(parsed, "sft")[0].train
    order = training_order(shard, parsed)
    tokens, mask = np.fromfile(shard.tokens_path, "<i4"), np.fromfile(shard.mask_path, "u1")
    size = parsed.effective_batch_size
    found = []
    for first in range(0, len(order.sequences) - 1, size):
        pieces = order.pieces[order.sequences[first] : order.sequences[first + size]]
        step = []
        for start, length, _ in pieces:
            ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))[None]
            step.append((ids, torch.where(torch.from_numpy(mask[start : start + length] == 1)[None], ids, -100)))
        found.append(step)
    return found


def by_torch(model: Any, config: dict[str, Any], total: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step; trains the model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config["weight_decay"]},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = config["adam_beta1"], config["adam_beta2"]
    optimizer = torch.optim.AdamW(groups, lr=config["learning_rate"], betas=betas, eps=config["adam_epsilon"])
    kind, specific = config.get("lr_scheduler_type", "linear"), {}
    if kind == "wsd":
        kind, specific = "warmup_stable_decay", {"decay_type": "linear"}
        specific["num_decay_steps"] = round(config["wsd_decay_ratio"] * total)
    scheduler = transformers.get_scheduler(
        kind, optimizer, num_warmup_steps=config["warmup_steps"], num_training_steps=total,
        scheduler_specific_kwargs=specific,
    )  # fmt: skip
    found = []
    for step in batches(config):
        optimizer.zero_grad()
        count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in step)
        total_loss = 0.0
        for ids, labels in step:
            logits = model(input_ids=ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum") / count
            loss.backward()
            total_loss += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, config["max_grad_norm"] or float("inf"))
        optimizer.step()
        scheduler.step()
        found.append((total_loss, float(norm)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_run_follows_torch(tmp_path, rows, case: str) -> None:
    changes = dict(CASES[case])
    source = write_model(tmp_path / "model", "qwen2", dtype=changes.pop("dtype", "float32"))
    config = config_for(tmp_path, source, rows, **(RUN | changes))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    first = first_adapter(tmp_path, config) if "lora" in changes else {}
    if first:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config["lora_rank"],
                lora_alpha=config.get("lora_alpha", 32.0),
                use_rslora=config.get("use_rslora", False),
                target_modules=config.get("lora_target_modules", "all-linear"),
                task_type="CAUSAL_LM",
            ),
        )
        peft.set_peft_model_state_dict(model, {n: torch.from_numpy(w) for n, w in first.items()})
    run = train({**config, "save_dtype": "float32"})
    expected = by_torch(model, config, len(run.history))
    assert len(expected) == len(run.history) >= 6
    for record, (loss, norm) in zip(run.history, expected, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-4), record["step"]
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-3), record["step"]
    ours = weights_of(run.result)
    theirs = peft.get_peft_model_state_dict(model) if first else model.state_dict()
    for name, weight in ours.items():
        assert np.abs(weight - theirs[name].detach().numpy()).max() < 1e-3, name
    if first:
        assert set(ours) == set(theirs)


def first_adapter(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The adapter before its first step: a run of one step with learning rate 0 leaves it as it was drawn."""
    run = train({**config, "output_dir": str(folder / "first"), "learning_rate": 0.0, "max_steps": 1})
    return weights_of(run.result)
