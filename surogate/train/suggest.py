"""A configuration for a model and a data set, from a look at both: what ``surogate init`` writes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surogate.config import make_config
from surogate.config.schema import TrainConfig
from surogate.data.report import DatasetReport
from surogate.data.tokenizer import Tokenizer
from surogate.errors import UserError
from surogate.train.setup import (
    ModelFiles,
    check_gpu_memory,
    check_memory,
    choose_device,
    compile_config,
    open_model,
    prepare_data,
)

_LOOK_AT = 1000  # rows
_LONGEST = 4096  # tokens: longer sequences are for the user to ask for
_STEPS = 20  # fewer in an epoch than this call for a smaller batch


@dataclass(frozen=True)
class Suggestion:
    """What was found. ``text``: YAML with comments; ``summary``: one line; ``mode``: ``sft`` or ``pt``."""

    text: str
    summary: str
    mode: str


def suggest(model: str, data: str) -> Suggestion:
    """Look at the model's config, at the first 1000 rows, and at this machine's memory.

    The tokens of these rows are not kept: a run tokenises all rows with its own sequence length.

    Args:
        model: folder, GGUF file or hub id; of its weights nothing is read.
        data: file, folder or hub id.

    Raises:
        UserError: model or data cannot be used, or no configuration fits into memory.
    """
    values: dict[str, Any] = {"model": model, "datasets": [{"path": data, "samples": _LOOK_AT}], "lora": True}
    files = open_model(make_config(values), with_weights=False)
    template = Tokenizer.load(files.directory).chat_template
    if template is None:
        values["chat_template"] = "chatml"
    found, lengths = _look(values, files)
    mode = "pt" if found.format == "text" else "sft"
    limit = min(int(files.config.get("max_position_embeddings") or _LONGEST), _LONGEST)
    longest = int(lengths.max())
    sequence_len = min(limit, max(512, -(-longest // 256) * 256)) if mode == "sft" else min(limit, 2048)
    whole = found.rows_in < _LOOK_AT
    settings = _fitting(values | {"sequence_len": sequence_len}, files)
    sequences = found.tokens / sequence_len
    batch, accumulation = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    while whole and batch * accumulation > 1 and sequences / (batch * accumulation) < _STEPS:
        batch, accumulation = (batch, accumulation // 2) if accumulation > 1 else (batch // 2, accumulation)
    settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    looked = f"all {found.rows_in:,} rows" if whole else f"the first {found.rows_in:,} rows"
    cut = int((lengths > sequence_len).sum())
    text = _write(model, data, settings, found, mode, looked, longest, cut, template is None, whole)
    summary = f"{mode}, {found.format} rows, sequences of {sequence_len}, {batch * accumulation} of them a step"
    return Suggestion(text, summary, mode)


def _look(values: dict[str, Any], files: ModelFiles) -> tuple[DatasetReport, np.ndarray]:
    """Tokenise the first rows whole; return their report and their lengths in tokens (int64)."""
    with tempfile.TemporaryDirectory(prefix="surogate-init-") as cache:
        looking = values | {"sequence_len": 2**24, "cache_dir": cache, "dataset_num_workers": 1}
        prepared, _ = prepare_data(make_config(looking), "sft", files=files)
        shard = prepared.train
        lengths = np.array([len(shard.row(number)[0]) for number in range(shard.rows)], np.int64)
    return prepared.report.datasets[0], lengths


def _fitting(values: dict[str, Any], files: ModelFiles) -> dict[str, Any]:
    """Return the values with the largest micro-batch, of 8 sequences a step, that memory holds."""
    refusal: UserError | None = None
    for batch, recompute in ((4, "selective"), (2, "selective"), (1, "selective"), (1, "block")):
        settings = values | {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": 8 // batch,
            "recompute": recompute,
        }
        config: TrainConfig = make_config(settings)
        device = choose_device(config)
        documents = batch * max(2, config.sequence_len // 16)
        compiled = compile_config(config, files, device, max_documents=documents, eval_documents=0)
        try:
            if device.gpu is None:
                check_memory(compiled, lambda message: None)
            check_gpu_memory(compiled, device)
        except UserError as error:
            refusal = error
            continue
        return settings
    assert refusal is not None
    raise refusal


def _write(
    model: str, data: str, settings: dict[str, Any], found: DatasetReport, mode: str, looked: str, longest: int,
    cut: int, no_template: bool, whole: bool,
) -> str:  # fmt: skip
    from surogate.config.messages import flow

    reason = f" ({found.reason})" if found.reason else ""
    name = Path(model.rstrip("/")).name.removesuffix(".gguf").lower() or "model"
    lines = [
        f"# Written by surogate init after a look at {looked}. To train: surogate {mode} THIS_FILE",
        f"model: {_quoted(model)}",
        f"output_dir: {_quoted(f'./outputs/{name}-lora')} # adapter, checkpoints, events",
        "",
        "datasets:",
        f"  - path: {_quoted(data)}",
        f"    type: {flow(found.format)} # what the rows look like{reason}".replace("\n", " "),
    ]
    if no_template and mode == "sft":
        lines.append("chat_template: chatml # the tokenizer has none of its own")
    if found.rows >= 200:
        lines.append("validation_split_ratio: 0.02 # held back; their loss is told at the end, or every eval_steps")
    lines.append("")
    if mode == "pt":
        lines.append(f"sequence_len: {settings['sequence_len']} # longer texts go on in the next sequence")
    else:
        over = f"; {cut:,} rows are longer" if cut else ""
        lines.append(f"sequence_len: {settings['sequence_len']} # the longest row has {longest:,} tokens{over}")
        lines.append("truncation: drop # longer rows are left out and counted; or: right, left, split")
    steps = (
        found.tokens
        / settings["sequence_len"]
        / (settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"])
    )
    about = f" # about {max(1, round(steps))} steps an epoch" if whole else ""
    lines += [
        f"per_device_train_batch_size: {settings['per_device_train_batch_size']} # what memory allows, at most 4",
        f"gradient_accumulation_steps: {settings['gradient_accumulation_steps']} # micro-batches in one step",
        f"num_train_epochs: 1{about}",
        "",
        "learning_rate: 2.0e-4 # for LoRA; about a tenth of it for all weights",
        "lr_scheduler_type: cosine",
        "warmup_ratio: 0.03",
        "",
        "lora: true # false: train all weights",
        "lora_rank: 16",
        "lora_alpha: 32",
        "lora_target_modules: all-linear",
        f"recompute: {settings['recompute']} # activations computed again in the backward pass, to save memory",
        "",
        "logging_steps: 1",
        "save_steps: 100 # resume_from_checkpoint=true goes on from the newest",
        "save_total_limit: 2",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """A YAML scalar that is read back as ``value``, also where it has ``${``, which is expanded when read."""
    import json

    return json.dumps(value.replace("${", "$${"), ensure_ascii=False)
