"""Answers of a model to a few prompts, to see what a training changed.

There is no key-value cache yet: every token computes the whole text again, in a program compiled for that length. Good
for a handful of short answers; a serving engine is the tool for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from surogate.adapters.lora import LoraOptions
from surogate.compile.compiler import CompileOptions, compile_model
from surogate.data.tokenizer import Tokenizer
from surogate.export.peft import Adapter, read_adapter
from surogate.io.config_json import read_model_config
from surogate.io.dtypes import TargetDType
from surogate.io.hub import resolve_model
from surogate.io.weights import WeightSource, open_weights
from surogate.models import build
from surogate.objectives.next_token import next_token
from surogate.recipes import get_recipe
from surogate.train.runtime import Runtime, physical_cores

_STEP = 16  # tokens by which the texts may grow before a longer program is compiled


def greedy(
    model_dir: str | Path, prompts: Sequence[str], adapter: str | Path | None = None, max_new_tokens: int = 64
) -> list[str]:
    """Complete user messages with the likeliest token at every place.

    Args:
        model_dir: folder, GGUF file or hub id.
        prompts: user messages; each is put into the tokenizer's chat template, if it has one.
        adapter: folder of a LoRA adapter in PEFT form.
        max_new_tokens: longest answer, in tokens; an answer ends earlier at the end-of-turn token.
    """
    directory = resolve_model(str(model_dir))
    tokenizer = Tokenizer.load(directory)
    weights, config = open_weights(directory), read_model_config(directory)
    held = read_adapter(adapter) if adapter is not None else None
    texts = [_encode(tokenizer, p) for p in prompts]
    starts = [len(t) for t in texts]
    stops = _stops(tokenizer, config)
    runtime: Runtime | None = None
    size = 0
    open_ = list(range(len(texts)))
    for _ in range(max_new_tokens):
        if not open_:
            break
        if runtime is None or max(len(texts[i]) for i in open_) > size:
            size = -(-max(len(texts[i]) for i in open_) // _STEP) * _STEP
            runtime = _runtime(config, weights, held, len(open_), size)
            slots = list(open_)
        for index, token in zip(slots, _next(runtime, [texts[i] for i in slots], size, tokenizer.pad_id), strict=True):
            if index in open_:
                texts[index].append(token)
        open_ = [i for i in open_ if texts[i][-1] not in stops]
    return [
        tokenizer.decode([t for t in text[start:] if t not in stops]) for text, start in zip(texts, starts, strict=True)
    ]


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt, add_special_tokens=True).ids)
    text = tokenizer.render_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return list(tokenizer.encode(text).ids)


def _stops(tokenizer: Tokenizer, config: dict[str, object]) -> set[int]:
    declared = config.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return {int(i) for i in [*ids, tokenizer.eos_id] if isinstance(i, int)}


def _runtime(
    config: dict[str, object], weights: WeightSource, adapter: Adapter | None, count: int, size: int
) -> Runtime:
    """A program for ``count`` texts of up to ``size`` tokens, with weights in place."""
    lora = None
    if adapter is not None:
        paths = tuple(adapter.tensors)
        rank = next(iter(adapter.tensors.values()))[0].shape[0]
        lora = LoraOptions(rank=rank, alpha=adapter.scale(paths[0]) * rank, targets=paths)
    threads = physical_cores()
    options = CompileOptions(count, size, count, get_recipe("fp32"), count, count, lora, threads=threads, train=False)
    runtime = Runtime(compile_model(build(config), options, weights.dtype, next_token(count)), threads)
    for name, weight in runtime.compiled.weights.items():
        if ".lora_" in name:
            assert adapter is not None
            path, matrix = name.rsplit(".lora_", 1)
            runtime.write(weight.ref, adapter.tensors[path][0 if matrix.startswith("A") else 1])
        else:
            stored: TargetDType = "bf16" if weight.ref.dtype == "bf16" else "f32"
            runtime.fill(weight.ref, partial(weights.read_into, name, dtype=stored))
    return runtime


def _next(runtime: Runtime, texts: Sequence[list[int]], size: int, pad: int) -> list[int]:
    """The likeliest next token of each text."""
    count = len(texts)
    ids = np.full((count, size), pad, np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text[:size])] = text[:size]
    values = {
        "ids": ids.reshape(-1),
        "positions": np.tile(np.arange(size, dtype=np.int32), count),
        "cu_seqlens": np.arange(count + 1, dtype=np.int32) * size,
        "rows": np.array([i * size + min(len(t), size) - 1 for i, t in enumerate(texts)], np.int32),
    }
    symbols = runtime.compiled.programs["eval_step"].symbols
    for name, value in values.items():
        runtime.write(symbols[name], value)
    runtime.engine.run("eval_step")
    logits = runtime.read(symbols["result"])
    return [int(i) for i in logits.argmax(-1)]
