"""Tests that need a GPU: skipped, with the reason, where there is none that Surogate can use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate import cuda
from surogate.errors import UserError
from tests.ops.harness import Target


@pytest.fixture(scope="session")
def gpu() -> cuda.Gpu:
    """The first GPU."""
    try:
        return cuda.require(0)
    except UserError as error:
        pytest.skip(f"no usable GPU: {error.what}")


@pytest.fixture(autouse=True)
def _needs_gpu(gpu: cuda.Gpu) -> None:
    """Every test of this folder."""


@pytest.fixture(scope="session")
def algorithms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what one test session finds out about matrix products."""
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="session")
def arguments(algorithms: Path) -> Callable[..., dict[str, Any]]:
    """Arguments of an engine on the first GPU; keywords as of ``cuda.engine_arguments``."""
    return lambda **options: cuda.engine_arguments(0, **{"cache_dir": algorithms, **options})


@pytest.fixture(scope="session")
def target(gpu: cuda.Gpu, arguments: Callable[..., dict[str, Any]]) -> Target:
    """The first GPU, for ``tests.ops.harness.run_native``. Algorithms are not timed: tests have better to do."""
    return Target(gpu.sm, arguments(tune=False))
