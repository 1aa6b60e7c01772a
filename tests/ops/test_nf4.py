"""NF4 against bitsandbytes: numbers, rounding, double quantisation, and the weights that come back, to the bit."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch

from surogate import _native
from surogate.ops import Sample, get_op, nf4
from surogate.ops.blockwise8 import dynamic_map, table
from tests.ops.harness import from_storage, make_case, run_native, to_storage
from tests.ops.test_adamw_8bit import their_quantize


def weights(rng: np.random.Generator, blocks: int = 40) -> np.ndarray:
    """Blocks of many magnitudes; the numbers themselves, the middles between them and their neighbours; zeros."""
    middles = (nf4.NF4[:-1] + nf4.NF4[1:]) / np.float32(2)
    edges = np.concatenate([nf4.NF4, middles])
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(2)), np.nextafter(edges, np.float32(-2))])
    edges = np.append(np.clip(edges, -1, 1), np.zeros(-len(edges) % 63, np.float32)).reshape(-1, 63)
    exact = np.concatenate([np.ones((len(edges), 1), np.float32), edges], axis=1)
    wide = rng.normal(size=(blocks, 64)) * 10.0 ** rng.integers(-6, 3, size=(blocks, 1))
    scaled = [exact * np.float32(s) for s in (1.0, 0.3, 1e-20)]
    return np.concatenate([*scaled, wide.astype(np.float32), np.zeros((2, 64), np.float32)]).reshape(-1)


def native(x: np.ndarray, dtype: str = "f32", block: int = 64, threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    stored = to_storage(x, dtype)
    codes, absmax = np.empty(-(-x.size // 2), np.uint8), np.empty(-(-x.size // block), np.float32)
    _native.quantize_4bit(stored, dtype, nf4.NF4, block, codes, absmax, threads)
    return codes, absmax


def test_numbers_are_theirs() -> None:
    assert np.array_equal(nf4.NF4, bnb.get_4bit_type("nf4", device="cpu").numpy())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("block", [64, 128])
def test_codes_are_theirs(dtype: str, block: int) -> None:
    """Their CPU path is a plain search for the nearest number, as ours."""
    x = from_storage(to_storage(weights(np.random.default_rng(0)), dtype), dtype).astype(np.float32)[: 64 * 45 - 20]
    given = torch.from_numpy(x).to(torch.float32 if dtype == "f32" else torch.bfloat16)
    theirs, state = bnb.quantize_4bit(given, blocksize=block, quant_type="nf4")
    for codes, absmax in (nf4.quantize(x, block), native(x, dtype, block, 1), native(x, dtype, block, 3)):
        magnitudes = state.absmax.numpy()
        assert np.array_equal(codes, theirs.numpy().reshape(-1)) and np.array_equal(absmax, magnitudes)


def test_double_quantisation_is_theirs() -> None:
    """With their exact search of magnitudes (float32 takes a coarse table there) and their mean, which PyTorch sums in
    float32: ours is the mean rounded once."""
    absmax = np.abs(np.random.default_rng(1).normal(size=1000) * 0.02).astype(np.float32) + np.float32(0.01)
    index, groups, offset = nf4.quantize_magnitudes(absmax)
    mean = torch.from_numpy(absmax).mean().numpy()
    assert abs(float(offset) - float(mean)) <= 4 * np.spacing(mean)
    wanted, magnitudes = their_quantize(absmax - offset, dynamic_map(True))
    assert np.array_equal(index, wanted) and np.array_equal(groups, magnitudes)
    found, scales = np.empty(1000, np.uint8), np.empty(4, np.float32)
    _native.quantize_8bit(absmax - offset, table(True), found, scales, 2)
    assert np.array_equal(found, index) and np.array_equal(scales, groups)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_theirs(dtype: str, nested: bool) -> None:
    """What bitsandbytes has quantised comes back as bitsandbytes gives it back."""
    check_weights(dtype, nested)


def check_weights(dtype: str, nested: bool, target=None) -> None:
    x = np.random.default_rng(2).normal(size=(96, 128)).astype(np.float32)
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    codes, state = bnb.quantize_4bit(torch.from_numpy(x).to(kind), quant_type="nf4", compress_statistics=nested)
    wanted = bnb.dequantize_4bit(codes, state).float().numpy()
    given = [codes.numpy().reshape(-1), state.absmax.numpy().astype(np.uint8 if nested else np.float64)]
    given += [state.state2.absmax.numpy(), state.offset.numpy().reshape(1), table(True)] if nested else [None] * 3
    given = [a.astype(np.float64) if a is not None and a.dtype == np.float32 else a for a in given]
    attrs = {"rows": 96, "columns": 128, "first": 0, "block": 64, "dtype": dtype}
    dtypes = ["u8", "u8" if nested else "f32", None, None, None, None, dtype]
    sample = Sample([*given, nf4.NF4.astype(np.float64), None], attrs, dtypes)
    found = run_native(make_case(get_op("dequantize_nf4"), sample), threads=2, target=target)[0]
    assert np.array_equal(found, wanted.astype(np.float64))
