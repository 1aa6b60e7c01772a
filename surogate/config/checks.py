"""Checks that look at more than one key, and at names that a folder enumerates.

The rule: a key that was written and would do nothing is an error, since its writer believes that it does something.
The one exception: ``lora: false`` written out, so that ``surogate sft lora.yaml lora=false`` is a full fine-tuning.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from surogate.errors import UserError

if TYPE_CHECKING:
    from surogate.config.schema import TrainConfig

#: Formats by their names elsewhere.
DATASET_TYPES: dict[str, str] = {
    "alpaca": "instruction",
    "sharegpt": "conversation",
    "chatml": "conversation",
    "chat": "conversation",
    "chat_template": "conversation",
    "messages": "conversation",
    "openai": "conversation",
    "conversational": "conversation",
    "jsonl": "json",
    "completion": "text",
    "pretrain": "text",
    "raw": "text",
}

_LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora")


def check(config: TrainConfig) -> None:
    """Raise the first :class:`UserError` of ``config``; its ``where`` is the key (``datasets.0.type``)."""
    for rule in RULES:
        for error in rule(config):
            raise error


def _given(config: TrainConfig, key: str) -> bool:
    return key in config.model_fields_set


def _duration(c: TrainConfig) -> Iterator[UserError]:
    if c.max_steps == 0:
        yield UserError(
            "max_steps is 0: nothing would be trained",
            where="max_steps",
            expected="a number of steps, or -1 to let num_train_epochs decide",
        )


def _warmup(c: TrainConfig) -> Iterator[UserError]:
    if c.warmup_steps and c.warmup_ratio:
        yield UserError(
            f"both warmup_steps ({c.warmup_steps}) and warmup_ratio ({c.warmup_ratio:g}) are given",
            where="warmup_ratio",
            expected="one of them",
            fix="leave warmup_ratio out",
        )
    key = "warmup_steps" if c.warmup_steps else "warmup_ratio"
    if c.lr_scheduler_type == "constant" and (c.warmup_steps or c.warmup_ratio):
        yield UserError(
            f"lr_scheduler_type is constant, so {key} would do nothing",
            where=key,
            fix="write lr_scheduler_type: constant_with_warmup",
        )


def _schedule(c: TrainConfig) -> Iterator[UserError]:
    if _given(c, "wsd_decay_ratio") and c.lr_scheduler_type != "wsd":
        yield UserError(
            f"lr_scheduler_type is {c.lr_scheduler_type}, so wsd_decay_ratio would do nothing",
            where="wsd_decay_ratio",
            fix="write lr_scheduler_type: wsd, or leave wsd_decay_ratio out",
        )
    if c.lr_scheduler_type == "wsd" and c.warmup_ratio + c.wsd_decay_ratio > 1:
        yield UserError(
            f"warmup_ratio + wsd_decay_ratio is {c.warmup_ratio + c.wsd_decay_ratio:g}",
            where="wsd_decay_ratio",
            expected="a sum of at most 1",
        )
    if c.min_lr_ratio and c.lr_scheduler_type.startswith("constant"):
        yield UserError(
            f"lr_scheduler_type is {c.lr_scheduler_type}, so min_lr_ratio would do nothing",
            where="min_lr_ratio",
            fix="write lr_scheduler_type: cosine, or leave min_lr_ratio out",
        )


def _validation(c: TrainConfig) -> Iterator[UserError]:
    if c.validation_datasets and c.validation_split_ratio:
        yield UserError(
            "both validation_datasets and validation_split_ratio are given",
            where="validation_split_ratio",
            expected="one of them",
            fix="leave validation_split_ratio out",
        )
    if c.eval_steps and not c.validation_datasets and not c.validation_split_ratio:
        yield UserError(
            "there is nothing to evaluate on",
            where="eval_steps",
            expected="validation_datasets or validation_split_ratio beside eval_steps",
            fix="add validation_split_ratio: 0.05, or leave eval_steps out",
        )


def _lora(c: TrainConfig) -> Iterator[UserError]:
    if c.lora:
        if c.from_scratch:
            yield UserError(
                "adapters on random weights that stay as they are learn nothing of use",
                where="from_scratch",
                expected="from_scratch with lora: false",
                fix="leave lora out",
            )
        return
    for key in _LORA_KEYS:
        if _given(c, key) and not _given(c, "lora"):
            yield UserError(
                f"{key} is given and lora is not, so all weights would be trained",
                where=key,
                expected="lora: true beside it (or lora: false, to train all weights on purpose)",
                fix="add the line lora: true",
            )


def _quantization(c: TrainConfig) -> Iterator[UserError]:
    if c.quantization != "off" and not c.lora:
        yield UserError(
            f"quantization is {c.quantization}, and weights of four bits cannot be trained themselves",
            where="quantization",
            expected="lora: true beside it",
            fix="add the line lora: true, or leave quantization out",
        )


def _recipe(c: TrainConfig) -> Iterator[UserError]:
    if _given(c, "master_weights") and c.recipe == "fp32":
        yield UserError(
            "recipe is fp32, so master_weights would do nothing",
            where="master_weights",
            fix="write recipe: bf16, or leave master_weights out",
        )


def _ranks(c: TrainConfig) -> Iterator[UserError]:
    if c.device != "cpu" and c.cpu_ranks > 1:
        yield UserError(
            f"device is {c.device}, so cpu_ranks might do nothing",
            where="cpu_ranks",
            expected="device: cpu beside it",
            fix="write device: cpu",
        )
    if c.zero_level and c.ranks == 1:
        yield UserError(
            "there is one rank, so zero_level would do nothing", where="zero_level", fix="leave zero_level out"
        )


def dataset_types() -> list[str]:
    """Names that a data set's ``type`` may have: ``auto``, ``json`` and the files of ``surogate/data/formats``."""
    folder = Path(__file__).parent.parent / "data" / "formats"
    formats = sorted(p.stem for p in folder.glob("[!_]*.py"))
    return list(dict.fromkeys(["auto", "json", *formats]))


def _dataset_types(c: TrainConfig) -> Iterator[UserError]:
    known = dataset_types()
    for name, sources in (("datasets", c.datasets), ("validation_datasets", c.validation_datasets)):
        for index, source in enumerate(sources):
            if source.type in known:
                continue
            ours = DATASET_TYPES.get(source.type.split(".")[0].lower())
            near = [ours] if ours else difflib.get_close_matches(source.type, known, n=1)
            yield UserError(
                f"there is no data format '{source.type}'",
                where=f"{name}.{index}.type",
                expected="one of " + ", ".join(known),
                fix=f"write type: {near[0]}" if near else "leave type out: it is found by looking at the rows",
            )


RULES: tuple[Callable[[TrainConfig], Iterator[UserError]], ...] = (
    _duration,
    _warmup,
    _schedule,
    _validation,
    _lora,
    _quantization,
    _recipe,
    _ranks,
    _dataset_types,
)
