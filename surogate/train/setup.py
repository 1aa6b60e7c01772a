"""From a configuration to a compiled model with weights in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import Compiled, CompileOptions, compile_model
from surogate.compile.groups import Optimizer
from surogate.config.schema import TrainConfig
from surogate.errors import UserError
from surogate.models import build
from surogate.ops.attention import NO_DETERMINISTIC_BACKWARD
from surogate.optim import make_optimizer
from surogate.recipes import get_recipe
from surogate.train.initial import initialise
from surogate.train.quantized import load_quantized
from surogate.train.runtime import Runtime, physical_cores

if TYPE_CHECKING:
    from surogate.cuda import Gpu
    from surogate.data import Prepared
    from surogate.data.tokenizer import Tokenizer
    from surogate.io.dtypes import TargetDType
    from surogate.io.weights import WeightSource

_LIBRARY_ROOM = 512 << 20  # cuBLASLt, cuDNN and CUDA graphs, beside the context
# Tokens from which on the CPU's matrix products run no faster with more of them (docs/performance.md).
_PASS_TOKENS = 1024

# Buffers that some checkpoints carry and every loader computes anew.
_COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


@dataclass
class ModelFiles:
    """A model's folder, read as far as compiling needs: config, and weights if they are wanted."""

    name: str
    directory: Path
    config: dict[str, Any]
    weights: WeightSource | None

    def stored_dtype(self, weight: str) -> str:
        """Dtype of a weight in its file; f32 where there is none."""
        if self.weights is None or weight not in self._names:
            return str(self.config.get("dtype") or self.config.get("torch_dtype") or "f32").replace("bfloat16", "bf16")
        return self.weights.dtype(weight)

    def __post_init__(self) -> None:
        self._names = set(self.weights.names()) if self.weights is not None else set()


def open_model(config: TrainConfig, *, with_weights: bool) -> ModelFiles:
    """Find the model (folder, GGUF file or hub id) and read its config."""
    from surogate.io.config_json import read_model_config
    from surogate.io.hub import resolve_model
    from surogate.io.weights import open_weights

    directory = resolve_model(config.model)
    weights = open_weights(directory) if with_weights and not config.from_scratch else None
    return ModelFiles(config.model, directory, read_model_config(directory), weights)


def threads_of(config: TrainConfig) -> int:
    """Threads of each CPU engine: as configured, or the physical cores, shared out among the ranks."""
    return config.cpu_threads or max(1, physical_cores() // config.cpu_ranks)


@dataclass(frozen=True)
class Device:
    """Where a run computes. ``gpu`` None: on the CPU. ``why_not``: why ``auto`` left a GPU alone, if there is one."""

    gpu: Gpu | None = None
    why_not: str = ""

    @property
    def kind(self) -> str:
        return "cpu" if self.gpu is None else "cuda"

    @property
    def sm(self) -> int:
        return 0 if self.gpu is None else self.gpu.sm

    def engine_arguments(self, config: TrainConfig, cache: Path) -> dict[str, Any] | None:
        """What :class:`Runtime` needs to drive the GPU; None for the CPU."""
        from surogate import cuda

        if self.gpu is None:
            return None
        # Algorithms that are chosen by timing differ from one empty cache to the next.
        return cuda.engine_arguments(
            self.gpu.index,
            cache_dir=cache,
            tune=not config.deterministic,
            eager=config.debug != "off",
            check_nan=config.debug == "check_nan",
        )


def choose_device(config: TrainConfig) -> Device:
    """The device of a configuration. ``auto`` takes the first GPU that can be used, else the CPU.

    Raises:
        UserError: ``device: cuda`` and no GPU can be used; the message says what is missing.
    """
    from surogate import cuda

    if config.device == "cpu":
        return Device()
    if config.device == "auto" and cuda.driver_version() is None:
        return Device()
    try:
        return Device(cuda.require(0))
    except UserError as error:
        if config.device == "auto":
            return Device(why_not=error.what)
        raise UserError(error.what, where=config.where("device"), expected=error.expected, fix=error.fix) from None


def check_memory(compiled: Compiled, warn: Callable[[str], None]) -> None:
    """Refuse a plan that this machine's memory cannot hold, and warn of one that only what is in use now prevents.

    Memory is handed out as it is touched, so a plan that is too large would end in a killed process some time later.
    """
    from surogate.track.machine import Machine
    from surogate.train.plan import human

    here, needed = Machine.here(), sum(compiled.memory.table().values()) * max(1, len(compiled.ranked))
    table = ", ".join(f"{purpose} {human(n)}" for purpose, n in compiled.memory.table().items() if n > 1 << 20)
    if 0 < here.memory < needed:
        raise UserError(
            f"the run needs {human(needed)} of memory ({table})",
            where="device",
            expected=f"at most the {human(here.memory)} of this machine",
            fix="lower per_device_train_batch_size or sequence_len, or set recompute: block (activations); "
            "set lora: true (gradients, optimizer)",
        )
    if 0 < here.available < needed:
        warn(f"the run needs {human(needed)} of memory ({table}), and {human(here.available)} are available now")


def check_gpu_memory(compiled: Compiled, device: Device) -> None:
    """Refuse a plan that the GPU has no room for, before anything is allocated."""
    from surogate import cuda
    from surogate.train.plan import human

    if device.gpu is None:
        return
    free, total = cuda.memory(device.gpu.index)
    needed = compiled.memory.size("device") + _LIBRARY_ROOM
    if needed > free:
        table = ", ".join(f"{purpose} {human(n)}" for purpose, n in compiled.memory.table().items() if n > 1 << 20)
        raise UserError(
            f"the run needs {human(needed)} of GPU memory ({table}, libraries {human(_LIBRARY_ROOM)})",
            where="device",
            expected=f"at most the {human(free)} that are free of {human(total)} on {device.gpu.name}",
            fix="lower per_device_train_batch_size or sequence_len, or set recompute: block (activations); "
            "set lora: true (gradients, optimizer)",
        )


def lora_options(config: TrainConfig) -> LoraOptions | None:
    """Adapter options of a configuration; None in full training."""
    if not config.lora:
        return None
    targets = config.lora_target_modules
    return LoraOptions(
        config.lora_rank, config.lora_alpha, config.lora_dropout, config.use_rslora,
        (targets,) if isinstance(targets, str) else tuple(targets),
    )  # fmt: skip


def optimizer_of(config: TrainConfig) -> Optimizer:
    """The optimizer of a configuration."""
    return make_optimizer(
        config.optim,
        moments={"float32": "f32", "bfloat16": "bf16"}[config.moments_dtype],
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def pass_batch(config: TrainConfig, device: Device) -> int:
    """Sequences that one run of ``micro_step`` takes: all of ``per_device_train_batch_size`` on a GPU. On the CPU the
    fewest that make ``_PASS_TOKENS`` tokens: the rest of the batch follows in further passes, whose gradients add up
    as those of accumulation do, so that activations of a part of the batch alone need memory at a time."""
    batch = config.per_device_train_batch_size
    if device.kind != "cpu":
        return batch
    enough = [n for n in range(1, batch + 1) if batch % n == 0 and n * config.sequence_len >= _PASS_TOKENS]
    return min(enough, default=batch)


def compile_config(
    config: TrainConfig, files: ModelFiles, device: Device, *, max_documents: int, eval_documents: int = 0
) -> Compiled:
    """Compile the model of a configuration for a device. ``eval_documents`` 0: no evaluation program."""
    options = CompileOptions(
        batch=pass_batch(config, device),
        sequence_len=config.sequence_len,
        max_documents=max_documents,
        recipe=get_recipe(config.recipe, master=config.master_weights, device=device.kind),
        eval_batch=config.eval_batch_size if eval_documents else 0,
        eval_documents=eval_documents,
        lora=lora_options(config),
        optimizer=optimizer_of(config),
        recompute=config.recompute,
        threads=threads_of(config),
        device=device.kind,
        sm=device.sm,
        deterministic=config.deterministic,
        quantization=config.quantization,
        ranks=config.ranks,
        zero_level=config.zero_level,
    )
    if config.deterministic and device.sm // 10 in NO_DETERMINISTIC_BACKWARD and options.activation == "bf16":
        raise UserError(
            "deterministic: true, and cuDNN has no backward pass of attention that gives the same bits each time on "
            f"compute capability {device.sm / 10:.1f}",
            where=config.where("deterministic"),
            fix="set deterministic: false, or recipe: fp32 (slow: plain attention kernels)",
        )
    model = build(files.config, where=str(files.directory / "config.json"))
    try:
        return compile_model(model, options, files.stored_dtype)
    except UserError as error:
        if error.where == "lora_target_modules":
            raise UserError(
                error.what, where=config.where("lora_target_modules"), expected=error.expected, fix=error.fix
            ) from None
        raise


def load_weights(runtime: Runtime, files: ModelFiles, seed: int) -> None:
    """Fill every weight: from the files, or, where the files cannot have it, with its first values.

    Raises:
        UserError: weights that are missing, of another shape, or that the architecture does not use. Training on with
            any of them would be silently wrong.
    """
    std = float(files.config.get("initializer_range", 0.02))
    source, compiled = files.weights, runtime.compiled
    expected = {n: w for n, w in compiled.weights.items() if ".lora_" not in n}
    if source is not None:
        _compare(source, {n: w.shape for n, w in expected.items()}, files)
    for name, weight in compiled.weights.items():
        if source is not None and weight.quantized is not None:
            load_quantized(runtime, weight.quantized, name, source, str(files.directory))
        elif source is not None and name in expected:
            stored: TargetDType = "bf16" if weight.ref.dtype == "bf16" else "f32"
            runtime.fill(weight.ref, partial(source.read_into, name, dtype=stored))
        else:
            runtime.fill(weight.ref, partial(initialise, how=weight.initial, name=name, seed=seed, std=std))
    for group in compiled.groups:
        for slot in group.slots:
            if runtime.holds(f"master.{slot}"):
                runtime.put(f"master.{slot}", runtime.values(slot))


def _compare(source: WeightSource, expected: Mapping[str, tuple[int, ...]], files: ModelFiles) -> None:
    found = set(source.names())
    where = str(files.directory)
    missing = [n for n in expected if n not in found]
    if missing:
        raise UserError(
            f"{len(missing)} weights are missing, the first is {missing[0]}",
            where=where,
            expected=f"{len(expected)} weights, as config.json describes the model",
            fix="download the model again, or check that config.json belongs to these weights",
        )
    tied = bool(files.config.get("tie_word_embeddings"))
    ignored = {"lm_head.weight"} if tied else set()
    spare = [n for n in found if n not in expected and n not in ignored and not n.endswith(_COMPUTED)]
    if spare:
        raise UserError(
            f"{len(spare)} weights belong to no part of the model, the first is {min(spare)}",
            where=where,
            expected="only weights that config.json's architecture uses",
            fix="check that config.json belongs to these weights",
        )
    for name, shape in expected.items():
        if tuple(source.shape(name)) != tuple(shape):
            raise UserError(
                f"{name} has shape {list(source.shape(name))}", where=where, expected=f"{list(shape)}, from config.json"
            )


def prepare_data(
    config: TrainConfig,
    mode: str,
    report: Callable[[str], None] | None = None,
    files: ModelFiles | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[Prepared, Tokenizer]:
    """Tokenise (or find in the cache) the data of a configuration.

    Args:
        config: of the run.
        mode: ``sft`` or ``pt``.
        report: gets lines of text.
        files: of the model, if it has been opened.
        progress: gets the data set that is tokenised and the share done; ``None``: ``report`` gets lines instead.
    """
    from surogate.data import DataOptions, DatasetSpec, prepare
    from surogate.data.tokenizer import Tokenizer

    files = files or open_model(config, with_weights=False)
    tokenizer = Tokenizer.load(files.directory)

    def spec(d: Any) -> DatasetSpec:
        fields = {n: v for n, v in d.model_dump().items() if n.endswith("_field") and v is not None}
        return DatasetSpec(d.path, d.type, d.split, d.subset, d.samples, d.weight, fields)

    cache = Path(config.cache_dir) if config.cache_dir else default_cache()
    options = DataOptions(
        datasets=[spec(d) for d in config.datasets],
        validation_datasets=[spec(d) for d in config.validation_datasets],
        validation_split_ratio=config.validation_split_ratio,
        sequence_len=config.sequence_len,
        objective="pt" if mode == "pt" else "sft",
        packing=config.sample_packing,
        truncation=config.truncation,
        train_on=config.train_on,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        min_supervised_share=config.min_supervised_share,
        max_invalid_share=config.max_invalid_share,
        seed=config.seed,
        vocab_size=int(files.config["vocab_size"]),
        num_workers=config.dataset_num_workers,
        cache_dir=cache,
    )
    return prepare(options, tokenizer, report or (lambda line: None), progress), tokenizer


def default_cache() -> Path:
    """``surogate`` in ``$XDG_CACHE_HOME``, else ``~/.cache/surogate``."""
    import os

    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surogate"


@dataclass(frozen=True)
class Duration:
    """How long a run is: ``epoch_steps`` of every epoch that is begun, and the total of optimizer steps."""

    epoch_steps: tuple[int, ...]
    total: int

    @property
    def epochs(self) -> int:
        return len(self.epoch_steps)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 1, in which optimizer step ``step`` (from 1) falls."""
        done = 0
        for epoch, steps in enumerate(self.epoch_steps, start=1):
            done += steps
            if step <= done:
                return epoch
        return len(self.epoch_steps)


def duration(steps_of_epoch: Callable[[int], int], epochs: float, max_steps: int) -> Duration:
    """Ask for as many epochs as the run needs. A fraction of an epoch is rounded up to whole steps."""
    steps: list[int] = []
    if max_steps > 0:
        while sum(steps) < max_steps:
            steps.append(steps_of_epoch(len(steps)))
        return Duration(tuple(steps), max_steps)
    whole = math.floor(epochs)
    steps = [steps_of_epoch(e) for e in range(whole)]
    total = sum(steps)
    if epochs > whole:
        steps.append(steps_of_epoch(whole))
        total += max(1, math.ceil(round((epochs - whole) * steps[-1], 6)))  # 1.1 - 1 is a little more than a tenth
    return Duration(tuple(steps), total)
