"""Whether a checkpoint is one of this run, and what has changed since it was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surogate.config.schema import TrainConfig
from surogate.data import Shard
from surogate.errors import UserError
from surogate.train.checkpoint import STATE_DIR, StateArrays, find_latest, load_state
from surogate.train.order import fingerprint
from surogate.train.setup import lora_options

# Keys that change no number of the run, or that the identity or the shapes of the state speak for.
_HARMLESS = {
    "output_dir", "run_name", "save_dtype", "datasets", "validation_datasets", "validation_split_ratio", "truncation",
    "train_on", "chat_template", "chat_template_kwargs", "min_supervised_share", "max_invalid_share",
    "dataset_num_workers", "cache_dir", "per_device_eval_batch_size", "seed", "sequence_len", "sample_packing", "lora",
    "lora_rank", "lora_alpha", "use_rslora", "lora_target_modules", "recipe", "master_weights", "from_scratch",
    "recompute", "cpu_threads", "debug", "logging_steps", "eval_steps", "save_steps", "save_total_limit",
    "resume_from_checkpoint", "cpu_ranks", "zero_level",
}  # fmt: skip

_FIX = "restore the old value, or leave out resume_from_checkpoint and choose another output_dir"


def identity(config: TrainConfig, shard: Shard) -> dict[str, Any]:
    """What must be the same for weights, optimizer and data position of a checkpoint to mean anything to a run."""
    lora = lora_options(config)
    return {
        "seed": config.seed,
        "sequence_len": config.sequence_len,
        "sample_packing": config.sample_packing,
        "effective_batch_size": config.effective_batch_size,
        "lora_scale": None if lora is None else lora.scale,
        "data": fingerprint(shard),
    }


def state_of(step: int, config: TrainConfig, shard: Shard, digest: str) -> dict[str, Any]:
    """The state that a checkpoint keeps beside the arrays. ``digest``: names the compiled programs, for the record."""
    keys = config.model_dump(mode="json")
    return {"step": step, "identity": identity(config, shard), "config": keys, "digest": digest}


def check_wanted(config: TrainConfig) -> None:
    """Refuse a ``resume_from_checkpoint`` that names no checkpoint, before anything is loaded."""
    wanted = config.resume_from_checkpoint
    if isinstance(wanted, bool) or (Path(wanted) / STATE_DIR).is_dir():
        return
    latest = find_latest(wanted, lambda line: None)
    raise UserError(
        f"{wanted} is no checkpoint" if Path(wanted).exists() else f"{wanted} does not exist",
        where=config.where("resume_from_checkpoint"),
        expected="a folder checkpoint-STEP that a run with save_steps has written",
        fix=f"write {latest}" if latest else "write true for the newest checkpoint in output_dir, or check the path",
    )


def find(config: TrainConfig, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from; None: the run starts anew."""
    wanted = config.resume_from_checkpoint
    if not wanted:
        return None
    path = find_latest(config.output_dir, warn) if wanted is True else Path(wanted)
    if path is None:
        warn(f"no complete checkpoint in {config.output_dir}; starting anew")
    return path


def load(
    path: Path, config: TrainConfig, shard: Shard, total: int, warn: Callable[[str], None]
) -> tuple[int, StateArrays]:
    """Read a checkpoint and hold it against the run.

    Args:
        path: of the checkpoint.
        config: of the run.
        shard: training rows of the run.
        total: optimizer steps of the run.
        warn: told of changes by which the run is no longer the one that was interrupted.

    Returns:
        The step it was written after, and its arrays.

    Raises:
        UserError: it is damaged, belongs to another run, or lies behind the end of this one.
    """
    state, arrays = load_state(path)
    where = str(path)
    for key, value in identity(config, shard).items():
        found = state["identity"].get(key)
        if found != value:
            raise UserError(
                f"the checkpoint was written with {key} {found!r}, this run has {value!r}",
                where=where,
                expected="the same data, seed, sequence length, batch and scale of adapters",
                fix=_FIX,
            )
    step = int(state["step"])
    if step > total:
        raise UserError(
            f"the checkpoint is of step {step}, and this run ends with step {total}",
            where=where,
            expected=f"a checkpoint of step {total} or an earlier one",
            fix="raise max_steps or num_train_epochs, or name an earlier checkpoint",
        )
    changes = _changes(state["config"], config.model_dump(mode="json"))
    if changes:
        warn(f"{'; '.join(changes)}: from step {step + 1} on this is not the run that was interrupted")
    return step, arrays


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = [k for k in new if k not in _HARMLESS and k in old and old[k] != new[k]]
    return [f"{k} was {old[k]} and is {new[k]}" for k in changed]
