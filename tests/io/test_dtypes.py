"""Conversions against PyTorch's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from surogate.io.dtypes import SLICE, bf16_to_f32, convert_into, f32_to_bf16

torch = pytest.importorskip("torch")


def interesting_bits() -> np.ndarray:
    """f32 bit patterns: every upper half, with lower halves around the rounding boundary."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return (upper[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)


def test_rounding_is_to_nearest_even() -> None:
    x = interesting_bits().view(np.float32)
    ours = f32_to_bf16(x)
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(bf16_to_f32(ours[nan])).all()


def test_widening_is_exact() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bf16_to_f32(bits).view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("source", ["f16", "f32", "f64", "bf16"])
@pytest.mark.parametrize("target", ["f32", "bf16"])
def test_convert_over_slice_edges(source: str, target: str) -> None:
    kinds = {"f16": torch.float16, "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
    x = torch.randn(SLICE + 7, generator=torch.Generator().manual_seed(0)).to(kinds[source])
    raw = x.view(torch.int16).numpy().view(np.uint16) if source == "bf16" else x.numpy()
    out = np.empty(x.numel(), np.float32 if target == "f32" else np.uint16)
    convert_into(raw, source, out, target)  # type: ignore[arg-type]
    expected = x.float().to(kinds[target])
    bits = expected.view(torch.int16).numpy().view(np.uint16) if target == "bf16" else expected.numpy()
    np.testing.assert_array_equal(out, bits)


def test_a_quantised_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="i8"):
        convert_into(np.zeros(1, np.int8), "i8", np.zeros(1, np.float32), "f32")
