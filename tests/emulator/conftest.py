from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surogate.cuda import Gpu
from tests.emulator import build
from tests.ops.harness import Target


@pytest.fixture(scope="session")
def arguments() -> Callable[..., dict[str, Any]]:
    """Arguments of an engine on the emulator; keywords as of ``cuda.engine_arguments``, of which it needs none."""
    plugin = str(build())
    return lambda **options: {"backend": "cuda", "device": 0, "plugin": plugin, "config": "tune=0"}


@pytest.fixture(scope="session")
def target(arguments: Callable[..., dict[str, Any]]) -> Target:
    return Target(90, arguments())


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return Gpu(0, "emulator", 90, 4, 16 << 30)
