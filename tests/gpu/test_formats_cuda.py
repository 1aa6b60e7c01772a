"""Narrow formats on the device: over all bit patterns the codes are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest

from surogate.ops import Sample, get_op
from surogate.ops.formats import E4M3, E5M2, Format
from tests.ops.harness import Target, make_case, run_native
from tests.ops.test_formats import edges, every_bf16
from tests.ops.test_nf4 import check_weights


@pytest.mark.parametrize("form,e5m2", [(E4M3, False), (E5M2, True)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_fp8_codes(target: Target, form: Format, e5m2: bool, dtype: str) -> None:
    x = np.concatenate([every_bf16(), np.resize(edges(form) / np.float32(4), 4096)])
    sample = Sample([x[None], None, np.array([4.0, 0.25])], {"e5m2": e5m2}, dtypes=[dtype, None, None])
    case = make_case(get_op("quantize_fp8"), sample)
    np.testing.assert_array_equal(run_native(case, target=target)[0], case.op.reference(case.operands(), case.attrs)[0])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bit_weights(target: Target, dtype: str, nested: bool) -> None:
    check_weights(dtype, nested, target)
