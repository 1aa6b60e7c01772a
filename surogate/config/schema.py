"""Every configuration key, once: type, default, help, and what other trainers call it.

The loader's error texts, the JSON Schema and ``docs/config.md`` are made from this file. A new key is one field here.

Scalars are strict (``"3"`` is no number, ``1`` is no truth value); only a whole number may stand where a real one is
asked for. Unknown keys are refused. Both models are frozen: a run's configuration does not change while it runs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    model_validator,
)

_EXTRA = "x-surogate"  # our own notes in a field's JSON Schema; taken out again before anybody else sees it


def _key(
    default: Any = ...,
    help: str = "",
    *,
    section: str = "",
    also: str = "",
    instead: Mapping[str, str] | None = None,
    **constraints: Any,
) -> Any:
    """Declare one key.

    Args:
        default: value when the key is left out; ``...`` makes the key required.
        help: what the key does, in full sentences; shown in ``docs/config.md`` and by editors.
        section: heading of ``docs/config.md`` that starts with this key.
        also: names in other trainers that mean the same and take the same value, separated by spaces.
        instead: names in other trainers whose value must be said differently here, each with the line to write
            (``A | B``: A for true, B for false).
        constraints: passed on to :func:`pydantic.Field` (``ge``, ``lt``, ...).
    """
    note: dict[str, Any] = {"section": section, "also": also.split(), "instead": dict(instead or {})}
    return Field(default, description=help, json_schema_extra={_EXTRA: note}, **constraints)


def _home(path: str) -> str:
    return os.path.expanduser(path) if path.startswith("~") else path


def _off(value: object) -> object:
    """YAML 1.1 reads a bare ``off`` or ``no`` as false; here both mean the choice named ``off``."""
    return "off" if value is False or value in ("no", "none") else value


def _quantization(value: object) -> object:
    """QLoRA by its other names."""
    return "nf4" if value in ("qlora_bnb", "bnb") else _off(value)


Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Text = Annotated[str, Strict(), Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_home)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False)


class DatasetConfig(_Strict):
    """One source of training or validation rows."""

    path: Path = _key(
        help="File (`.jsonl`, `.json`, `.parquet`, `.csv`, `.txt`), folder, or id of a data set on the Hugging Face "
        "hub. A relative path is taken from the current directory.",
        examples=["data.jsonl"],
        also="data_path file dataset dataset_name",
        instead={"data_files": "path: FILE", "ds_type": "path: FILE (its ending says what kind it is)"},
    )
    type: Text = _key(
        "auto",
        "What a row is: `instruction` (instruction, input, output), `conversation` (a list of turns), `text` (one "
        "field of running text), or another format under `surogate/data/formats/`. `auto` and `json` look at the "
        "first rows and decide; the run says what was decided.",
        also="format formatting dataset_type data_format",
    )
    split: Text = _key("train", "Split of a data set from the hub, e.g. `train` or `train[:5000]`.")
    subset: Text | None = _key(
        None,
        "Configuration of a data set from the hub, e.g. `wikitext-2-raw-v1`.",
        also="name config dataset_config_name",
    )
    samples: Annotated[int, Strict(), Field(ge=1)] | None = _key(
        None, "Use only the first so many rows.", also="max_samples num_samples max_train_samples limit"
    )
    weight: Number = _key(
        1.0,
        "How often each row is seen in an epoch: 2 shows every row twice, 0.5 every second row.",
        gt=0,
        also="repeats",
    )
    instruction_field: Text | None = _key(
        None, "Name of the field with the instruction; the usual names when left out.", also="field_instruction"
    )
    input_field: Text | None = _key(None, "Name of the field with the instruction's input.", also="field_input")
    output_field: Text | None = _key(None, "Name of the field with the answer.", also="field_output response_field")
    system_field: Text | None = _key(None, "Name of the field with the system message.", also="field_system")
    text_field: Text | None = _key(
        None, "Name of the field with running text.", also="field text_column dataset_text_field"
    )
    messages_field: Text | None = _key(
        None, "Name of the field with the list of turns.", also="field_messages conversation_column messages"
    )
    prompt_field: Text | None = _key(None, "Name of the field with the prompt, in prompt/completion rows.")
    completion_field: Text | None = _key(None, "Name of the field with the completion, in prompt/completion rows.")


class TrainConfig(_Strict):
    """What ``surogate sft``, ``surogate pt`` and ``surogate plan`` read. See the fields for meaning and units."""

    model: Path = _key(
        help="The model to start from: a folder in Hugging Face layout, a `.gguf` file, or an id on the Hugging Face "
        "hub (downloaded on first use). A relative path is taken from the current directory.",
        section="Model and output",
        examples=["Qwen/Qwen3-0.6B"],
        also="base_model model_name_or_path model_name model_id pretrained_model_name_or_path checkpoint_dir",
    )
    output_dir: Path = _key(
        "outputs",
        "Folder for checkpoints, events and the finished adapter or model. A relative path is taken from the current "
        "directory, not from the configuration file.",
        also="output save_dir out_dir output_path",
    )
    run_name: Text | None = _key(
        None, "Name of the run in its events. Default: the last part of `output_dir`.", also="wandb_name wandb_run_name"
    )
    from_scratch: Bool = _key(
        False,
        "Only for `surogate pt`: start from random weights; of `model` only config and tokenizer are used.",
        also="train_from_scratch random_init",
        instead={"reinit_weights": "from_scratch: true"},
    )
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _key(
        "auto", "Type in which a fully trained model is written. `auto`: that of the checkpoint it started from."
    )

    datasets: tuple[DatasetConfig, ...] = _key(
        help="Rows to train on: a list, each entry with at least `path`.",
        section="Data",
        min_length=1,
        examples=[[{"path": "data.jsonl"}]],
        also="train_datasets",
        instead={
            name: "datasets: [{path: FILE_OR_ID}]"
            for name in ("dataset", "dataset_name", "train_dataset", "train_file", "data", "train_data", "data_path")
        },
    )
    validation_datasets: tuple[DatasetConfig, ...] = _key(
        (),
        "Rows for evaluation, in the same form.",
        also="test_datasets eval_datasets",
        instead={
            name: "validation_datasets: [{path: FILE_OR_ID}]"
            for name in ("eval_dataset", "validation_file", "val_dataset", "test_dataset", "dataset_val")
        },
    )
    validation_split_ratio: Number = _key(
        0.0,
        "Share of the training rows that is held back for evaluation, chosen by `seed`.",
        ge=0,
        lt=1,
        also="val_set_size val_size test_size eval_split_ratio",
        instead={"validation_split_percentage": "validation_split_ratio: 0.05 (a share, not per cent)"},
    )
    sequence_len: Int = _key(
        1024,
        "Length of a training sequence, in tokens.",
        ge=2,
        le=2**24,
        also="cutoff_len max_seq_length max_length max_seq_len seq_len seq_length sequence_length block_size "
        "model_max_length context_length",
    )
    sample_packing: Bool = _key(
        True,
        "Put several rows into one sequence. Rows never see one another: attention, positions and loss are those of "
        "each row alone.",
        also="packing packed neat_packing pack",
    )
    truncation: Literal["drop", "left", "right", "split"] = _key(
        "drop",
        "Rows longer than `sequence_len`: `drop` leaves them out and counts them, `right` cuts the end off, `left` "
        "the beginning, `split` makes several pieces of them.",
        also="truncation_side excess_length_strategy sequence_len_overflow_handling",
    )
    train_on: (
        Literal["assistant", "last_turn", "all", "completion_only"]
        | Annotated[tuple[Literal["assistant", "user", "tool", "system", "developer"], ...], Field(min_length=1)]
    ) = _key(
        "assistant",
        "Tokens that are trained: all `assistant` turns, only the `last_turn` of them, `all` tokens, "
        "`completion_only` (of prompt/completion and instruction rows), or all turns of some roles: a list such as "
        "`[assistant, tool]`. `surogate pt` trains on all.",
        also="roles_to_train",
        instead={
            "train_on_inputs": "train_on: all | train_on: assistant",
            "train_on_prompt": "train_on: all | train_on: assistant",
            "train_on_input": "train_on: all | train_on: assistant",
            "mask_history": "train_on: last_turn",
            "completion_only_loss": "train_on: completion_only",
            "assistant_only_loss": "train_on: assistant",
            "train_on_responses_only": "train_on: assistant",
        },
    )
    min_supervised_share: Number = _key(
        0.001,
        "Refuse data of which a smaller share of the tokens is trained: then type, template or roles are mostly not "
        "what was meant. 0: refuse only data without any.",
        ge=0,
        le=1,
    )
    max_invalid_share: Number = _key(
        0.5,
        "Refuse data of which a larger share of the rows cannot be read as meant (null content, unknown role, ...). "
        "0: refuse the first such row.",
        ge=0,
        le=1,
    )
    chat_template: Text | None = _key(
        None,
        "Chat template: a name that Surogate knows, or a path of a Jinja file. Default: the tokenizer's own.",
        also="template prompt_template chat_template_path chat_template_jinja",
    )
    chat_template_kwargs: dict[Text, Any] = _key(
        {},
        "Variables for the chat template, such as `{enable_thinking: false}`. Those that a row brings win.",
        also="template_kwargs",
        instead={
            "enable_thinking": "chat_template_kwargs: {enable_thinking: true} | "
            "chat_template_kwargs: {enable_thinking: false}"
        },
    )
    dataset_num_workers: Int = _key(
        0,
        "Processes that tokenize. 0: as many as there are cores.",
        ge=0,
        also="preprocessing_num_workers dataset_num_proc dataset_processes dataloader_num_workers num_proc",
    )
    cache_dir: Path | None = _key(
        None,
        "Folder for tokenized data. Default: `surogate` in `$XDG_CACHE_HOME`, else `~/.cache/surogate`. Models and "
        "data sets from the hub stay in the hub's own cache.",
        also="dataset_prepared_path tokenized_path",
    )

    per_device_train_batch_size: Int = _key(
        2,
        "Sequences in one micro-batch.",
        section="Batch and duration",
        ge=1,
        also="micro_batch_size batch_size train_batch_size device_batch_size",
    )
    per_device_eval_batch_size: Annotated[int, Strict(), Field(ge=1)] | None = _key(
        None, "Sequences in one micro-batch of evaluation. Default: as in training.", also="eval_batch_size"
    )
    gradient_accumulation_steps: Int = _key(
        4,
        "Micro-batches in one step. Loss and gradient are those of the whole batch: sum over target tokens / their "
        "number, whatever the split.",
        ge=1,
        also="gradient_accumulation grad_accum_steps accumulation_steps accumulate_grad_batches",
    )
    num_train_epochs: Number = _key(
        1.0,
        "Passes over the data. A fraction stops within a pass: 0.25 trains on the first quarter of the first one.",
        gt=0,
        also="num_epochs epochs max_epochs n_epochs",
    )
    max_steps: Int = _key(
        -1,
        "Stop after so many optimizer steps, and repeat the data as often as that takes. -1: `num_train_epochs` "
        "decides.",
        ge=-1,
        also="max_train_steps num_steps train_steps max_iters num_train_steps",
        instead={"max_steps_per_epoch": "max_steps: STEPS (of the whole run)"},
    )
    seed: Int = _key(
        42, "Fixes order of data, new weights, dropout and held-back rows.", ge=0, le=2**63 - 1, also="random_seed"
    )

    learning_rate: Number = _key(2e-4, "Highest learning rate.", section="Optimizer", ge=0, also="lr max_lr peak_lr")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "wsd"] = _key(
        "linear",
        "Course of the learning rate after warm-up: `linear` or `cosine` down to `min_lr_ratio`, `constant` "
        "(no warm-up), `constant_with_warmup`, or `wsd` (stable, then a linear fall at the end).",
        also="lr_scheduler scheduler lr_schedule lr_decay_style",
    )
    warmup_ratio: Number = _key(
        0.0, "Share of all steps over which the learning rate rises from 0.", ge=0, le=1, also="lr_warmup_ratio"
    )
    warmup_steps: Int = _key(
        0,
        "The same in steps. Give one of the two.",
        ge=0,
        also="num_warmup_steps lr_warmup_steps warmup_iters",
    )
    wsd_decay_ratio: Number = _key(
        0.1, "Only for `wsd`: share of all steps over which the learning rate falls at the end.", gt=0, le=1
    )
    min_lr_ratio: Number = _key(
        0.0,
        "Learning rate at the end / `learning_rate`, for `linear`, `cosine` and `wsd`.",
        ge=0,
        le=1,
        also="cosine_min_lr_ratio final_lr_fraction final_lr_frac",
        instead={"min_lr": "min_lr_ratio: RATIO (min_lr / learning_rate)"},
    )
    optim: Literal["adamw", "adamw_8bit"] = _key(
        "adamw",
        "Optimizer. `adamw_8bit`: moments in eight bits an element, block-wise as bitsandbytes has them; matrices of "
        "fewer than 4096 elements, norms and biases keep them as `moments_dtype` says.",
        also="optimizer optim_type",
    )
    moments_dtype: Literal["float32", "bfloat16"] = _key(
        "float32",
        "Type in which AdamW's moments are kept. `bfloat16` (rounded stochastically) halves their memory.",
        also="optimizer_state_dtype optim_state_dtype exp_avg_dtype",
    )
    weight_decay: Number = _key(0.0, "Decoupled weight decay of matrices; norms and biases have none.", ge=0)
    max_grad_norm: Number = _key(
        1.0,
        "Clip the global gradient norm to this. 0: no clipping; the norm is reported all the same.",
        ge=0,
        also="clip_grad_norm grad_clip gradient_clipping gradient_clip_val clip_grad max_norm",
    )
    adam_beta1: Number = _key(0.9, "Decay of AdamW's first moment.", ge=0, lt=1, also="beta1 adam_b1")
    adam_beta2: Number = _key(0.999, "Decay of AdamW's second moment.", ge=0, lt=1, also="beta2 adam_b2")
    adam_epsilon: Number = _key(
        1e-8, "AdamW's epsilon, added to the root of the second moment.", gt=0, also="adam_eps eps epsilon"
    )

    lora: Bool = _key(
        False,
        "Train low-rank adapters and leave the model's own weights as they are. `false`: train all weights.",
        section="LoRA",
        also="use_lora use_peft enable_lora",
        instead={
            "adapter": "lora: true",
            "finetuning_type": "lora: true | lora: false",
            "peft_type": "lora: true",
            "train_type": "lora: true | lora: false",
        },
    )
    lora_rank: Int = _key(16, "Rank of the adapters.", ge=1, also="lora_r r rank lora_dim")
    lora_alpha: Number = _key(
        32.0, "Adapters are scaled by `lora_alpha / lora_rank` (with `use_rslora`: / its root).", gt=0, also="alpha"
    )
    lora_dropout: Number = _key(0.0, "Dropout on the adapters' input, in training only.", ge=0, lt=1)
    lora_target_modules: Literal["all-linear"] | Annotated[tuple[Text, ...], Field(min_length=1)] = _key(
        "all-linear",
        "Linear layers that get an adapter: a list of names as Hugging Face has them, such as `[q_proj, v_proj]`, or "
        "`all-linear`: all but the output layer.",
        also="lora_target target_modules lora_modules lora_attn_modules",
        instead={"lora_target_linear": "lora_target_modules: all-linear"},
    )
    use_rslora: Bool = _key(
        False,
        "Scale adapters by `lora_alpha / sqrt(lora_rank)` (Kalajdzievski 2023, arXiv 2312.03732).",
        also="peft_use_rslora lora_use_rslora use_rs_lora rslora",
    )

    recipe: Literal["auto", "fp32", "bf16"] = _key(
        "auto",
        "Number formats. `fp32`: all that is trained is fp32; frozen weights stay in the checkpoint's type when that "
        "loses nothing. `bf16`: trained weights are stored in bf16. `auto`: fp32 on the CPU, bf16 on a GPU.",
        section="Numbers, memory, device",
        instead={
            "bf16": "recipe: bf16",
            "fp16": "recipe: bf16 (training in fp16 is not offered)",
            "fp32": "recipe: fp32",
            "tf32": "recipe: fp32",
            "pure_bf16": "recipe: bf16 and master_weights: false",
            "dtype": "recipe: bf16 or recipe: fp32",
            "torch_dtype": "recipe: bf16 or recipe: fp32",
            "precision": "recipe: bf16 or recipe: fp32",
            "mixed_precision": "recipe: bf16",
            "fp8": "recipe: bf16 (fp8 is not in this version)",
        },
    )
    quantization: Annotated[Literal["off", "nf4"], BeforeValidator(_quantization)] = _key(
        "off",
        "How the frozen weights of linear layers are stored, with `lora: true`. `nf4` (also `qlora_bnb`): four bits a "
        "weight, block-wise with double quantisation as bitsandbytes has them; embedding, norms and output head stay "
        "as `recipe` says. Adapters are trained as ever.",
        instead={name: "quantization: nf4" for name in ("load_in_4bit", "qlora_bnb")},
    )
    master_weights: Bool = _key(
        True, "With bf16 weights: keep an fp32 copy that is updated. `false`: round stochastically instead."
    )
    recompute: Annotated[Literal["off", "selective", "block"], BeforeValidator(_off)] = _key(
        "selective",
        "Compute activations again in the backward pass instead of keeping them: `off` (fastest, by a percent or two), "
        "`selective` (what is cheap: norms and activation functions), `block` (keep only the input of each block; "
        "least memory). Results are the same.",
        instead={
            name: "recompute: block"
            for name in (
                "gradient_checkpointing",
                "use_gradient_checkpointing",
                "activation_checkpointing",
                "enable_activation_checkpointing",
            )
        },
    )
    device: Literal["auto", "cpu", "cuda"] = _key(
        "auto",
        "Where to train. `auto`: the first GPU that can be used, else the CPU. `cuda`: refused, with the reason, where "
        "none can be used.",
    )
    cpu_threads: Int = _key(
        0,
        "Threads of the CPU engine. 0: one for each physical core. The numbers do not depend on it.",
        ge=0,
        le=4096,
        also="num_threads threads omp_num_threads",
    )
    cpu_ranks: Int = _key(
        1,
        "On the CPU: ranks that train together, as GPUs do; for tests of what several GPUs will do, with the same "
        "numbers. Cores are shared out among them (`cpu_threads`, if given, is for each).",
        ge=1,
        le=64,
    )
    zero_level: Literal[0, 1] = _key(
        0,
        "What each of several ranks keeps a part of alone instead of all of it (Rajbhandari et al. 2019, "
        "arXiv 1910.02054): 0 nothing, 1 the optimizer's states. Results are the same, bit for bit.",
        also="zero_stage zero",
    )
    deterministic: Bool = _key(
        False,
        "The same bits from run to run, on one kind of device with one set of libraries. The CPU always gives them. On "
        "a GPU it costs speed (the backward pass of attention adds in a fixed order, and matrix products take the "
        "library's first proposal instead of the algorithm that was fastest here) and memory for attention; compute "
        "capabilities 8.x and 12.x have it with `recipe: fp32` alone.",
        also="full_determinism use_deterministic_algorithms",
    )
    debug: Annotated[Literal["off", "eager", "check_nan"], BeforeValidator(_off)] = _key(
        "off",
        "For finding faults. `eager`: on a GPU, launch kernel by kernel instead of as CUDA graphs, so that an error "
        "names the instruction; the CPU always does. `check_nan`: besides, look at every result of every instruction "
        "and stop at the first that has a NaN, with the instruction and its layer. Results are the same; slow.",
        instead={name: "debug: check_nan" for name in ("detect_anomaly", "debug_nans")},
    )

    logging_steps: Int = _key(
        1,
        "Steps between two lines of the log. The events file has every step.",
        section="Logging, evaluation, checkpoints",
        ge=1,
        also="log_every_n_steps log_steps log_interval logging_interval print_every",
    )
    eval_steps: Int = _key(
        0,
        "Evaluate every so many steps, and at the end. 0: only at the end, if there are validation rows.",
        ge=0,
        also="eval_interval eval_every eval_freq run_val_every_n_steps",
        instead={
            name: "eval_steps: STEPS" for name in ("eval_strategy", "evaluation_strategy", "evals_per_epoch", "do_eval")
        },
    )
    save_steps: Int = _key(
        0,
        "Write a checkpoint every so many steps. 0: only the result, at the end.",
        ge=0,
        also="save_interval checkpoint_every save_every checkpointing_steps",
        instead={name: "save_steps: STEPS" for name in ("save_strategy", "saves_per_epoch")},
    )
    save_total_limit: Int = _key(
        0, "Keep the newest so many checkpoints. 0: keep all.", ge=0, also="max_checkpoints keep_last_n_checkpoints"
    )
    resume_from_checkpoint: Bool | Path = _key(
        False,
        "`true`: go on from the newest complete checkpoint in `output_dir`; a path: from that one; `false`: start "
        "anew. A resumed run is bit for bit the one that was not interrupted.",
        also="resume resume_from auto_resume_from_checkpoints resume_training",
    )

    _provenance: Any = PrivateAttr(None)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        from surogate.config.checks import check  # late: the checks are about this class

        check(self)
        return self

    def where(self, key: str) -> str:
        """Say where ``key`` (as ``datasets.0.path``) was given, for a :class:`~surogate.errors.UserError`.

        Returns ``file:line:column``, ``command line: key=value``, or the bare key for a configuration made in Python.
        """
        return key if self._provenance is None else self._provenance.where(key)

    @property
    def eval_batch_size(self) -> int:
        """Sequences in one micro-batch of evaluation."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def effective_batch_size(self) -> int:
        """Sequences in one optimizer step, of all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.ranks

    @property
    def ranks(self) -> int:
        """Engines that train together."""
        return self.cpu_ranks


#: Names in other trainers that need no key here, and why. ``*`` at the end stands for anything.
NOT_NEEDED: dict[str, str] = {
    "load_in_8bit": "eight bits are not in this version (quantization: nf4 has four); leave the line out",
    "quantization_*": "quantization: nf4 needs no more; leave the line out",
    "bnb_4bit*": "quantization: nf4 is always NF4 with double quantisation; leave the line out",
    "flash_attn*": "attention is always exact and block-wise; leave the line out",
    "flash_attention*": "attention is always exact and block-wise; leave the line out",
    "sdp_attention": "attention is always exact and block-wise; leave the line out",
    "attn_implementation": "attention is always exact and block-wise; leave the line out",
    "deepspeed*": "training on several devices is not in this version; leave the line out",
    "fsdp*": "training on several devices is not in this version; leave the line out",
    "ddp*": "training on several devices is not in this version; leave the line out",
    "gpus": "training on several GPUs is not in this version; leave the line out",
    "offload*": "offload is not in this version; leave the line out",
    "report_to": "events.jsonl in output_dir is always written; trackers are not in this version; leave the line out",
    "wandb*": "events.jsonl in output_dir is always written; trackers are not in this version; leave the line out",
    "mlflow*": "events.jsonl in output_dir is always written; trackers are not in this version; leave the line out",
    "pad_to_sequence_len": "sequences always have sequence_len tokens; leave the line out",
    "group_by_length": "sample_packing fills sequences better than that; leave the line out",
    "push_to_hub": "results stay in output_dir; leave the line out",
    "hub_*": "results stay in output_dir; leave the line out",
    "trust_remote_code": "code that comes with a model is never run; leave the line out",
    "overwrite_output_dir": "nothing that exists is overwritten by mistake; leave the line out",
    "stage": "the command says it: surogate sft or surogate pt; leave the line out",
    "do_train": "the command says it: surogate sft or surogate pt; leave the line out",
    "model_type": "the model's config.json says it; leave the line out",
    "tokenizer_type": "the model's folder has its tokenizer; leave the line out",
    "dataset_dir": "write the whole path in datasets, or start from that folder; leave the line out",
    "torch_compile": "every program is compiled before the first step; leave the line out",
    "compile": "every program is compiled before the first step; leave the line out",
    "remove_unused_columns": "fields that are not named are left alone; leave the line out",
    "dataloader*": "data is fed by the engine; leave the line out",
    "special_tokens": "the tokenizer's own are used; leave the line out",
    "<<": "YAML's merge key is not supported; write the keys out",
}

#: Values that other trainers call otherwise: (key, their value) to ours.
RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("lr_scheduler_type", "cosine_with_min_lr"): "cosine (and min_lr_ratio: RATIO)",
    ("lr_scheduler_type", "warmup_stable_decay"): "wsd",
    ("optim", "adamw_torch"): "adamw",
    ("optim", "adamw_torch_fused"): "adamw",
    ("optim", "adamw_hf"): "adamw",
    ("optim", "adamw_bnb_8bit"): "adamw_8bit",
    ("optim", "adamw8bit"): "adamw_8bit",
    ("moments_dtype", "bf16"): "bfloat16",
    ("moments_dtype", "fp32"): "float32",
    ("lora_target_modules", "all"): "all-linear",
    ("lora_target_modules", "linear"): "all-linear",
    ("resume_from_checkpoint", "auto"): "true",
    ("resume_from_checkpoint", "latest"): "true",
    ("recompute", "full"): "block",
    ("recompute", "unsloth"): "block",
    ("train_on", "last"): "last_turn",
}

#: Values that are known and not (yet) offered: (key, value) to what to say.
REFUSED_VALUES: dict[tuple[str, str], str] = {
    **{
        ("recipe", name): f"{name} is not in this version; write recipe: bf16"
        for name in ("fp8_hybrid", "fp8-hybrid", "fp8", "nvfp4")
    },
    ("recipe", "fp16"): "training in fp16 is not offered; write recipe: bf16",
    ("device", "gpu"): "write device: cuda",
    ("device", "mps"): "there is no backend for Apple's GPUs; write device: cpu",
    **{
        ("lr_scheduler_type", name): f"{name} is not in this version; write lr_scheduler_type: cosine"
        for name in ("cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau")
    },
    **{
        ("optim", name): f"{name}: paging is not in this version; write optim: {name.removeprefix('paged_')}"
        for name in ("paged_adamw_8bit", "paged_adamw_32bit")
    },
    **{
        ("optim", name): f"{name} is not in this version; write optim: adamw"
        for name in ("adafactor", "muon", "lion", "sgd")
    },
}


def raw_schema() -> dict[str, Any]:
    """JSON Schema with our notes (``x-surogate``) and with ``datasets`` items resolved. Not for others' eyes."""
    schema = TrainConfig.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
            return {name: resolve(value) for name, value in node.items()}
        return [resolve(value) for value in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a configuration file, for editors."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: strip(value) for name, value in node.items() if name != _EXTRA}
        return [strip(value) for value in node] if isinstance(node, list) else node

    schema: dict[str, Any] = strip(copy.deepcopy(raw_schema()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Surogate configuration"}


def note(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`_key` noted about a key: ``section``, ``also``, ``instead``."""
    found: dict[str, Any] = fragment.get(_EXTRA, {})
    return found
