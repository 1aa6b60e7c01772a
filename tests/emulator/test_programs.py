"""Whole programs as they are compiled for a GPU, on the emulator: loss and gradients are those of the CPU."""

from __future__ import annotations

from tests.gpu.test_models import (  # noqa: F401
    test_four_bit_weights_are_those_of_the_cpu,
    test_loss_and_gradients_are_those_of_the_cpu,
)
