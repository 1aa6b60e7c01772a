"""Our kernels on the GPU against the NumPy references: every sample of every op, activations in f32 and in bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate.ops import Sample, all_ops, get_op
from tests.ops.harness import Target, assert_close, make_case, run_native, run_reference

# Operands that are activations or their gradients, by op.
ACTIVATIONS: dict[str, tuple[int, ...]] = {
    "add": (0, 1), "add_rmsnorm": (0, 1), "dropout": (0,), "embedding": (), "embedding_backward": (0,), "mul": (0, 1),
    "qk_norm_rope": (0, 1), "qk_norm_rope_backward": (0, 1, 2, 3), "rmsnorm": (0,), "rmsnorm_backward": (0, 1, 4),
    "rope": (0,), "scale": (0,), "sum_rows": (0,), "quantize_fp8": (0,),
    "swiglu": (0, 1), "swiglu_backward": (0, 1, 2),
    **{name: (0,) for name in ("silu", "gelu", "gelu_tanh", "relu", "tanh")},
    **{f"{name}_backward": (0, 1) for name in ("silu", "gelu", "gelu_tanh", "relu", "tanh")},
}  # fmt: skip
_LIBRARY = ("matmul", "attention", "attention_backward", "lm_head_loss", "lm_head_loss_grad")
_OURS = sorted(n for n, op in all_ops().items() if not op.view and n not in _LIBRARY)


def samples(name: str) -> list[Sample]:
    return list(get_op(name).samples(np.random.default_rng(7)))


def in_bf16(name: str, sample: Sample) -> Sample:
    dtypes = list(sample.dtypes or [None] * len(sample.inputs))
    for index in ACTIVATIONS[name]:
        if sample.inputs[index] is not None:
            dtypes[index] = "bf16"
    attrs = {**sample.attrs, "dtype": "bf16"} if name == "embedding" else sample.attrs
    return replace(sample, dtypes=dtypes, attrs=attrs, rtol=2.0**-7, atol=2.0**-6)


def wide(name: str, rng: np.random.Generator) -> list[Sample]:
    """Rows as models have them: whole packs, several packs a thread."""
    x, y, z = (rng.normal(size=(37, 1024)) for _ in range(3))
    w, long = rng.normal(size=1024), rng.normal(size=(5, 7168))
    heads = rng.normal(size=(19, 6, 128))
    # Narrow heads of many tokens: a block has several pieces in turn, and as many blocks as there may be leave sums.
    q, k = rng.normal(size=(1500, 3, 6)), rng.normal(size=(1500, 1, 6))
    angle, six = rng.uniform(0, 6, size=(1500, 3)), rng.normal(size=6)
    backward = [q, k, q[::-1], k[::-1], six, six, np.cos(angle), np.sin(angle), six, None]
    found = {
        "rmsnorm": [Sample([x, w], {"eps": 1e-6}), Sample([long, rng.normal(size=7168)], {"eps": 1e-6}),
                    Sample([heads, rng.normal(size=128)], {"eps": 1e-6})],
        "add_rmsnorm": [Sample([x, y, w], {"eps": 1e-6})],
        "rmsnorm_backward": [Sample([x, y, w, rng.random(37) + 0.5, z, None], {"need_dx": True, "need_dw": False}),
                             Sample([x, y, w, rng.random(37) + 0.5, None, w], {"need_dx": True, "need_dw": True})],
        "qk_norm_rope_backward": [Sample(backward, {"eps": 1e-6, "need_dx": True, "need_dw": True})],
        "swiglu": [Sample([x, y])], "swiglu_backward": [Sample([x, y, z])], "add": [Sample([x, y])],
        "dropout": [Sample([x, np.array([123456789012])], {"p": 0.3, "salt": 5}, dtypes=[None, "i64"])],
        "embedding": [Sample([rng.normal(size=(50, 256)), rng.integers(0, 50, 300)], dtypes=["bf16", "i32"])],
        "embedding_backward": [Sample([rng.normal(size=(700, 256)), rng.integers(0, 5, 700), None], {"rows": 9})],
    }  # fmt: skip
    return [replace(s, atol=1e-3, rtol=1e-4) for s in found.get(name, [])]


@pytest.mark.parametrize("name", _OURS)
def test_f32(target: Target, name: str) -> None:
    for sample in [*samples(name), *wide(name, np.random.default_rng(3))]:
        case = make_case(get_op(name), replace(sample, rtol=max(sample.rtol, 1e-4), atol=max(sample.atol, 1e-5)))
        wanted = run_reference(case)
        assert_close(case, run_native(case, target=target), wanted)
        assert_close(case, run_native(case, target=target, strided=True), wanted)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_bf16(target: Target, name: str) -> None:
    for sample in [*samples(name), *wide(name, np.random.default_rng(3))]:
        case = make_case(get_op(name), in_bf16(name, sample))
        wanted = run_reference(case)
        first = run_native(case, target=target, runs=3)
        assert_close(case, first, wanted)
        assert_close(case, run_native(case, target=target, strided="bf16"), wanted)
        for a, b in zip(first, run_native(case, target=target), strict=True):
            assert (a is None and b is None) or (a == b).all() or np.isnan(a).any()


@pytest.mark.parametrize("name", [n for n in _OURS if get_op(n).may_reuse])
def test_in_place(target: Target, name: str) -> None:
    """A result in the storage of an operand, where the op says that the kernel allows it."""
    for sample in samples(name):
        case = make_case(get_op(name), replace(sample, rtol=max(sample.rtol, 1e-4)))
        types = case.op.infer(case.types, case.attrs)
        for out, operands in case.op.may_reuse.items():
            for operand in operands:
                if types[out] is not None and types[out] == case.types[operand]:
                    found = run_native(case, target=target, reuse={out: operand})
                    assert_close(case, found, run_reference(case))


def test_every_op_has_a_kernel(arguments) -> None:
    from surogate._native import Engine

    kernels = set(Engine(**arguments()).kernels())
    assert {n for n, op in all_ops().items() if not op.view} <= kernels
