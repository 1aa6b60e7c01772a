"""What a checkpoint holds: files for others (Hugging Face or PEFT), and the state by which a run goes on exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from surogate.compile.compiler import Weight
from surogate.errors import UserError
from surogate.train.runtime import Runtime

if TYPE_CHECKING:
    from surogate.config.schema import TrainConfig
    from surogate.data.tokenizer import Tokenizer
    from surogate.train.setup import ModelFiles

_SAVE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "f32": "f32", "bf16": "bf16", "f16": "f16"}
_RESUME_FIX = "resume with the configuration that wrote the checkpoint, or start anew in another output_dir"


class Exporter:
    """Writes the trained model or adapter of a runtime in the layout that the Hugging Face ecosystem loads."""

    def __init__(self, runtime: Runtime, config: TrainConfig, files: ModelFiles, tokenizer: Tokenizer) -> None:
        self.runtime, self.config, self.files, self.tokenizer = runtime, config, files, tokenizer

    @property
    def dtype(self) -> str:
        """Dtype of a full model's files: ``f32``, ``bf16`` or ``f16``."""
        if self.config.save_dtype != "auto":
            return _SAVE[self.config.save_dtype]
        if self.files.weights is not None:
            from surogate.io.weights import checkpoint_dtype

            return _SAVE.get(checkpoint_dtype(self.files.weights), "f32")
        declared = str(self.files.config.get("dtype") or self.files.config.get("torch_dtype") or "float32")
        return _SAVE.get(declared, "f32")

    def write(self, directory: Path) -> None:
        """Adapter or model, with tokenizer and chat template."""
        compiled = self.runtime.compiled
        if compiled.adapters is not None:
            self._write_adapter(directory)
        else:
            self._write_model(directory)
        self.tokenizer.save(directory)

    def _write_adapter(self, directory: Path) -> None:
        from surogate.export.peft import write_adapter

        compiled, config = self.runtime.compiled, self.config
        assert compiled.adapters is not None
        tensors = {
            m: (self.runtime.trained(f"{m}.lora_A.weight"), self.runtime.trained(f"{m}.lora_B.weight"))
            for m in compiled.adapters.modules
        }
        write_adapter(
            directory, base_model_name_or_path=self.files.name, r=config.lora_rank, lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout, use_rslora=config.use_rslora, target_modules=self._targets(),
            tensors=tensors,
        )  # fmt: skip

    def _targets(self) -> list[str]:
        targets = self.config.lora_target_modules
        assert self.runtime.compiled.adapters is not None
        return self.runtime.compiled.adapters.names if isinstance(targets, str) else list(targets)

    def _write_model(self, directory: Path) -> None:
        from surogate.export.hf import write_hf_model

        weights = self.runtime.compiled.weights
        tensors = [(n, self.dtype, tuple(w.ref.shape), self._reader(n)) for n, w in weights.items()]
        write_hf_model(directory, self.files.config, tensors, self.files.directory)

    def _reader(self, name: str) -> Callable[[], np.ndarray]:
        """Hands out the weight in the dtype of the file, from its master copy where there is one."""
        from surogate.io.dtypes import bf16_to_f32, f32_to_bf16

        def read() -> np.ndarray:
            held = self.runtime.trained(name)
            if self.dtype == "bf16":
                return held if held.dtype == np.uint16 else f32_to_bf16(held)
            exact = bf16_to_f32(held) if held.dtype == np.uint16 else held
            return exact.astype(np.float16) if self.dtype == "f16" else exact

        return read

    def nbytes(self) -> int:
        """Bytes of the files, for checking the room on the disk."""
        size = {"f32": 4, "bf16": 2, "f16": 2}[self.dtype]
        chosen = [w for w in self.runtime.compiled.weights.values() if self._written(w)]
        return sum(int(np.prod(w.ref.shape)) * (4 if self.runtime.compiled.adapters else size) for w in chosen)

    def _written(self, weight: Weight) -> bool:
        return self.runtime.compiled.adapters is None or ".lora_" in weight.name


def trained_state(runtime: Runtime) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that changes from step to step, by name and without a copy: weights, moments, master copies."""
    for name, weight in runtime.compiled.weights.items():
        if not weight.trainable:
            continue
        yield f"weight.{name}", runtime.array(name)
        for prefix in runtime.compiled.states:
            slot = f"{prefix}.{name}"
            if runtime.holds(slot):
                yield slot, runtime.array(slot)


def restore(runtime: Runtime, arrays: Mapping[str, np.ndarray], where: str) -> None:
    """Put a checkpoint's state back. Raises :class:`UserError` when it belongs to another configuration."""
    wanted = dict(trained_state(runtime))
    spare = [name for name in arrays if name not in wanted]
    if spare:
        raise UserError(
            f"{min(spare)} in the checkpoint is nothing that this run trains",
            where=where,
            expected=f"{len(wanted)} arrays, found {len(spare)} more",
            fix=_RESUME_FIX,
        )
    for name, target in wanted.items():
        found = arrays.get(name)
        if found is None or found.shape != target.shape or found.dtype != target.dtype:
            what = "is missing" if found is None else f"is {found.dtype}{list(found.shape)}"
            raise UserError(
                f"{name} {what} in the checkpoint",
                where=where,
                expected=f"{target.dtype}{list(target.shape)}",
                fix=_RESUME_FIX,
            )
        runtime.put(name.removeprefix("weight."), found)
