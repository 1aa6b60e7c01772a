"""Every row of the table of reports has a trial: here, or where the part that it is about is tested anyway."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Row to the tests elsewhere that run its trial.
ELSEWHERE = {
    15: (
        "train/test_resume.py::test_resumed_is_uninterrupted",
        "train/test_resume.py::test_killed_twenty_times",
        "data/test_feeding.py::test_a_run_goes_on_with_the_same_rows_on_other_ranks_and_batches",
    ),
    16: (
        "io/test_checkpoint.py::test_killed_before_every_single_change_of_the_file_system",
        "io/test_checkpoint.py::test_what_is_incomplete_is_passed_over_and_reported",
    ),
    17: (
        "export/test_adapters.py::test_peft_loads_ours",
        "train/test_runs.py::test_adapter_loads_in_peft_and_merges",
    ),
    19: (
        "train/test_runs.py::test_bf16_weights_move_by_small_steps",
        "ops/test_adamw.py::test_stochastic_rounding_is_unbiased",
    ),
}


def names(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", range(1, 21))
def test_has_a_trial(row: int) -> None:
    here = {name for path in Path(__file__).parent.glob("test_*.py") for name in names(path)}
    own = [name for name in here if name.startswith(f"test_{row:02d}_")]
    assert own or row in ELSEWHERE
    for other in ELSEWHERE.get(row, ()):
        file, name = other.split("::")
        assert name in names(TESTS / file), other
