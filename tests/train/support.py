"""Tiny models on disk, data for them, and runs of the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from surogate.config import make_config
from surogate.models import architectures
from surogate.train import Run, run
from tests.data.samples import write_tokenizer


def write_model(folder: Path, model_type: str = "llama", *, dtype: str = "float32", **changes: Any) -> Path:
    """A random model of the architecture's tiny config, with a small byte-level tokenizer, as transformers saves it."""
    import torch
    import transformers

    config = {**architectures()[model_type].TINY, "vocab_size": 420, **changes}
    torch.manual_seed(0)
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_rows(path: Path, rows: int = 12, seed: int = 0, words: tuple[int, int] = (3, 20)) -> Path:
    """Instruction rows of different lengths."""
    rng = np.random.default_rng(seed)
    vocabulary = ["red", "blue", "one", "two", "cat", "dog", "sun", "sea", "old", "new"]

    def text() -> str:
        return " ".join(rng.choice(vocabulary, rng.integers(*words)))

    lines = [json.dumps({"instruction": text(), "output": text()}) for _ in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def config_for(folder: Path, model: Path, data: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of a small run into ``folder/out``."""
    return {
        "model": str(model),
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
        "datasets": [{"path": str(data), "type": "instruction"}],
        "chat_template": "chatml",
        "sequence_len": 96,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "cpu_threads": 1,
        "dataset_num_workers": 1,
        **changes,
    }


def train(config: dict[str, Any], mode: str = "sft") -> Run:
    """Run a configuration in this process."""
    return run(make_config(config), mode)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of an adapter or model, as they lie in the files."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            found.update({n: f.get_tensor(n) for n in f.keys()})  # noqa: SIM118 (no dict)
    return {n: t.float().numpy() for n, t in found.items()}


def same_files(a: Path, b: Path) -> bool:
    """Whether the weights in two folders are the same bytes."""
    names = [p.name for p in sorted(a.glob("*.safetensors"))]
    return bool(names) and all((a / n).read_bytes() == (b / n).read_bytes() for n in names)
