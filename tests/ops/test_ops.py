"""Every op, on every sample: native kernel against reference, gradient rule against differences, storage rules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from surogate.ops import Sample, all_ops, get_op
from tests.ops.harness import assert_close, check_gradient, make_case, run_native, run_reference

_SAMPLES: list[tuple[str, int, Sample]] = [
    (name, index, sample)
    for name, op in sorted(all_ops().items())
    for index, sample in enumerate(op.samples(np.random.default_rng(7)))
]


def _cases(samples: list[tuple[str, int, Sample]]) -> list:
    return [pytest.param(name, sample, id=f"{name}-{index}") for name, index, sample in samples]


every_sample = pytest.mark.parametrize("name,sample", _cases(_SAMPLES))
every_kernel_sample = pytest.mark.parametrize("name,sample", _cases([s for s in _SAMPLES if not get_op(s[0]).view]))


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_has_samples(name: str) -> None:
    assert any(n == name for n, _, _ in _SAMPLES), f"{name} has no sample, so nothing holds its kernel to its reference"


def test_kernels_and_ops_are_the_same_set() -> None:
    from surogate._native import Engine

    assert sorted(Engine("cpu", 1).kernels()) == sorted(n for n, op in all_ops().items() if not op.view)


@every_sample
def test_types_and_cost(name: str, sample: Sample) -> None:
    op, case = get_op(name), make_case(get_op(name), sample)
    types = op.infer(case.types, sample.attrs)
    results = run_reference(case)
    assert [None if t is None else t.shape for t in types] == [None if r is None else np.shape(r) for r in results]
    cost = op.cost(case.types, types, sample.attrs)
    assert cost.flops >= 0 and cost.nbytes >= 0


@every_kernel_sample
def test_native_is_reference(name: str, sample: Sample) -> None:
    case = make_case(get_op(name), sample)
    assert_close(case, run_native(case), run_reference(case))


@every_kernel_sample
def test_column_windows(name: str, sample: Sample) -> None:
    case = make_case(get_op(name), sample)
    assert_close(case, run_native(case, strided=True), run_reference(case))


@every_kernel_sample
def test_results_do_not_depend_on_threads(name: str, sample: Sample) -> None:
    case = make_case(get_op(name), sample)
    one = run_native(case, threads=1)
    for threads in (2, 3):
        for a, b in zip(one, run_native(case, threads=threads), strict=True):
            assert (a is None and b is None) or np.array_equal(a, b), f"{threads} threads give other bits"


def _reuses(samples: list[tuple[str, int, Sample]]) -> list:
    """Every way in which a sample's results may take the storage of its operands, one or several at a time."""
    found = []
    for name, index, sample in samples:
        op, case = get_op(name), make_case(get_op(name), sample)
        types = op.infer(case.types, sample.attrs)
        taken = {o: i for o, i in op.inplace.items() if i < len(case.types) and case.types[i] is not None}
        choices: list[list[int | None]] = []
        for out, operands in op.may_reuse.items():
            wanted = None if out in taken else types[out]
            fits = [i for i in operands if i < len(case.types) and wanted is not None and case.types[i] == wanted]
            choices.append([None, *fits])
        for choice in itertools.product(*choices):
            reuse = {out: i for out, i in zip(op.may_reuse, choice, strict=True) if i is not None}
            storage = [*reuse.values(), *taken.values()]
            if reuse and len(set(storage)) == len(storage):
                label = "-".join(f"{out}in{i}" for out, i in reuse.items())
                found.append(pytest.param(name, sample, reuse, id=f"{name}-{index}-{label}"))
    return found


@pytest.mark.parametrize("name,sample,reuse", _reuses(_SAMPLES))
def test_results_in_the_storage_of_operands(name: str, sample: Sample, reuse: dict[int, int]) -> None:
    case = make_case(get_op(name), sample)
    for strided in (False, True):
        assert_close(case, run_native(case, strided=strided, reuse=reuse), run_reference(case))


@pytest.mark.parametrize("name,sample", _cases([s for s in _SAMPLES if s[2].differentiable]))
def test_gradient_rule_is_the_slope(name: str, sample: Sample) -> None:
    check_gradient(get_op(name), sample, np.random.default_rng(11))
