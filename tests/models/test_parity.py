"""Every architecture against transformers on torch, fp32 on the CPU: loss and the gradient of every parameter."""

from __future__ import annotations

import numpy as np
import pytest

from surogate.adapters.lora import LoraOptions
from surogate.models import architectures
from tests.support import Rows, clear_gradients, gradient, make_runtime, micro_step, relative

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LOSS, GRADIENT = 1e-5, 1e-4  # relative errors that are allowed

VARIANTS = {
    "llama-untied-gqa1": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-llama3-rope": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 16}},
    ),
    "llama-linear-rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
}  # fmt: skip
CASES = {name: (name, {}) for name in architectures()} | VARIANTS


def reference(config: dict, seed: int = 0):
    """A random transformers model of this config; every weight away from its trivial value."""
    torch.manual_seed(seed)
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").float()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def documents(rng: np.random.Generator, vocabulary: int, lengths: list[int]) -> list[list[int]]:
    return [rng.integers(1, vocabulary, n).tolist() for n in lengths]


def torch_loss(model, docs: list[list[int]]):
    """Sum of the token losses of each document alone, and the number of targets."""
    total, count = 0.0, 0
    for doc in docs:
        ids = torch.tensor([doc])
        logits = model(input_ids=ids).logits[0].float()
        total = total + torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        count += len(doc) - 1
    return total, count


def load(runtime, state: dict) -> None:
    for name in runtime.compiled.weights:
        if ".lora_" not in name:
            runtime.array(name)[...] = state[name].detach().numpy()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recompute", ["off", "block"])
def test_loss_and_gradients(case: str, recompute: str) -> None:
    model_type, changes = CASES[case]
    config = {**architectures()[model_type].TINY, **changes}
    model = reference(config)
    rng = np.random.default_rng(1)
    sequences = [documents(rng, config["vocab_size"], n) for n in ([23, 14], [31], [5, 2, 19])]
    total, count = torch_loss(model, [d for s in sequences for d in s])
    (total / count).backward()

    runtime = make_runtime(config, batch=3, sequence_len=40, max_documents=9, recompute=recompute)
    load(runtime, dict(model.state_dict()))
    loss = micro_step(runtime, Rows(sequences, 40).arrays(9), 1.0 / count)
    assert loss == pytest.approx(float(total), rel=LOSS)
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(runtime.compiled.weights)
    worst = {n: relative(gradient(runtime, n), p.grad.numpy()) for n, p in parameters.items()}
    assert max(worst.values()) <= GRADIENT, sorted(worst.items(), key=lambda kv: -kv[1])[:5]


@pytest.mark.parametrize("model_type", list(architectures()))
@pytest.mark.parametrize("options", [
    LoraOptions(rank=4, alpha=8.0),
    LoraOptions(rank=3, alpha=7.0, rslora=True, targets=("q_proj", "down_proj")),
])  # fmt: skip
def test_lora_against_peft(model_type: str, options: LoraOptions) -> None:
    peft = pytest.importorskip("peft")
    config = dict(architectures()[model_type].TINY)
    base = reference(config)
    state = {n: p.detach().clone() for n, p in base.state_dict().items()}
    targets = "all-linear" if "all-linear" in options.targets else list(options.targets)
    model = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            target_modules=targets,
            use_rslora=options.rslora,
            task_type="CAUSAL_LM",
        ),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(torch.randn_like(p) * 0.1)
    rng = np.random.default_rng(2)
    sequences = [documents(rng, config["vocab_size"], n) for n in ([17, 9], [28])]
    total, count = torch_loss(model, [d for s in sequences for d in s])
    (total / count).backward()

    runtime = make_runtime(config, batch=2, sequence_len=32, max_documents=6, lora=options, recompute="selective")
    load(runtime, state)
    trained = {}
    for name, p in model.named_parameters():
        if "lora_" in name:
            ours = name.removeprefix("base_model.model.").replace(".default", "")
            runtime.array(ours)[...] = p.detach().numpy()
            trained[ours] = p.grad.numpy()
    assert set(trained) == {n for n, w in runtime.compiled.weights.items() if w.trainable}
    loss = micro_step(runtime, Rows(sequences, 32).arrays(6), 1.0 / count)
    assert loss == pytest.approx(float(total), rel=LOSS)
    worst = {n: relative(gradient(runtime, n), g) for n, g in trained.items()}
    assert max(worst.values()) <= GRADIENT, sorted(worst.items(), key=lambda kv: -kv[1])[:5]


@pytest.mark.parametrize("recompute", ["off", "selective", "block"])
@pytest.mark.parametrize("threads", [1, 2])
def test_recompute_and_threads_change_no_bit(recompute: str, threads: int) -> None:
    config = architectures()["qwen3"].TINY
    rng = np.random.default_rng(3)
    sequences = [documents(rng, config["vocab_size"], n) for n in ([23, 14], [31])]
    found = []
    for mode, n in (("off", 2), (recompute, threads)):
        runtime = make_runtime(
            config, batch=2, sequence_len=40, max_documents=6, recompute=mode, threads=n,
            lora=LoraOptions(rank=4, dropout=0.3),
        )  # fmt: skip
        weights = np.random.default_rng(5)
        for name in runtime.compiled.weights:
            target = runtime.array(name)
            target[...] = weights.normal(size=target.shape) * 0.2
        loss = micro_step(runtime, Rows(sequences, 40).arrays(6), 0.01, seed=7)
        grads = [gradient(runtime, n) for n, w in runtime.compiled.weights.items() if w.trainable]
        found.append((loss, b"".join(g.tobytes() for g in grads)))
    assert found[0] == found[1]


def test_packed_padded_and_accumulated_agree() -> None:
    """The same rows alone, padded, packed and over several micro-batches: one loss and one gradient."""
    config = architectures()["llama"].TINY
    rng = np.random.default_rng(4)
    docs = documents(rng, config["vocab_size"], [11, 23, 7, 16])
    count = sum(len(d) - 1 for d in docs)
    layouts = [
        [Rows([[docs[0], docs[1]], [docs[2], docs[3]]], 36)],
        [Rows([[docs[3], docs[2], docs[0]], [docs[1]]], 36)],
        [Rows([[docs[0]], [docs[1]]], 36), Rows([[docs[2]], [docs[3]]], 36)],
        [Rows([[docs[0]], []], 36), Rows([[docs[3]], [docs[1], docs[2]]], 36)],
    ]
    runtime = make_runtime(config, batch=2, sequence_len=36, max_documents=8)
    weights = np.random.default_rng(5)
    for name in runtime.compiled.weights:
        target = runtime.array(name)
        target[...] = weights.normal(size=target.shape) * 0.2
    results = []
    for layout in layouts:
        clear_gradients(runtime)
        loss = sum(micro_step(runtime, rows.arrays(8), 1.0 / count) for rows in layout)
        results.append((loss, {n: gradient(runtime, n) for n in runtime.compiled.weights}))
    for loss, grads in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        for name, grad in grads.items():
            assert relative(grad, results[0][1][name]) < 1e-6, name
