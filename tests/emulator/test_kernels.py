"""The tests of our CUDA kernels (tests/gpu), on the emulator."""

from __future__ import annotations

from tests.gpu.test_formats_cuda import *  # noqa: F403
from tests.gpu.test_ops import *  # noqa: F403
from tests.gpu.test_ops_cuda import *  # noqa: F403
from tests.gpu.test_optimizers_cuda import *  # noqa: F403
