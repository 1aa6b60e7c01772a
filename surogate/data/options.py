"""What to train on, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Objective = Literal["sft", "pt"]
Truncation = Literal["drop", "left", "right", "split"]
TrainOn = Literal["assistant", "last_turn", "all", "completion_only"] | Sequence[str]


@dataclass(frozen=True)
class DatasetSpec:
    """One source of rows.

    Attributes:
        path: file, folder, pattern with ``*``, or id of a data set on the Hugging Face hub.
        type: a format of :mod:`surogate.data.formats`, or ``auto``, or ``json`` (JSON whatever the file is called, and
            otherwise as ``auto``).
        split: split of a hub data set or of a folder whose files are named after splits.
        subset: configuration of a hub data set.
        samples: take only the first so many rows.
        weight: how often each row is seen in an epoch; ``None`` is 1. The fraction of a row is drawn anew every epoch.
        fields: names of columns: ``instruction_field``, ``input_field``, ``output_field``, ``system_field``,
            ``text_field``, ``messages_field``, ``prompt_field``, ``completion_field``.
    """

    path: str
    type: str = "auto"
    split: str | None = None
    subset: str | None = None
    samples: int | None = None
    weight: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DataOptions:
    """Everything that tokens, order and report depend on, besides the tokenizer.

    Attributes:
        datasets: where the training rows are; their rows follow one another.
        validation_datasets: likewise for validation rows.
        validation_split_ratio: share of the training rows that is held back, used without ``validation_datasets``.
        sequence_len: tokens in a sequence.
        objective: ``pt`` trains on every token and splits long documents, whatever ``train_on`` and ``truncation`` say.
        packing: several rows a sequence.
        truncation: what happens to rows longer than ``sequence_len``.
        train_on: which tokens are targets; a sequence of roles: those of all turns of these roles.
        chat_template: a name, the path of a Jinja file, or ``None``: the tokenizer's own.
        chat_template_kwargs: more variables for the template; those of a row win.
        seed: chooses the validation rows and, by :func:`surogate.data.epoch_order`, the order.
        vocab_size: rows of the model's embedding; 0: not checked.
        num_workers: processes that tokenise; 0: one a core.
        cache_dir: folder of the cache.
        min_supervised_share: refuse data of which a smaller share of tokens is trained.
        max_invalid_share: refuse data of which a larger share of rows cannot be read as meant. 0: refuse the first.
    """

    datasets: Sequence[DatasetSpec]
    cache_dir: Path
    validation_datasets: Sequence[DatasetSpec] = ()
    validation_split_ratio: float = 0.0
    sequence_len: int = 1024
    objective: Objective = "sft"
    packing: bool = True
    truncation: Truncation = "drop"
    train_on: TrainOn = "assistant"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 42
    vocab_size: int = 0
    num_workers: int = 0
    min_supervised_share: float = 0.001
    max_invalid_share: float = 0.5

    @property
    def splits_rows(self) -> bool:
        """Long rows are kept whole and split into pieces when the order is made."""
        return self.objective == "pt" or self.truncation == "split"
