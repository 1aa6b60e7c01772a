"""Trained weights in float32; frozen weights stay as the checkpoint has them when that is bf16."""

from surogate.recipes import Recipe


def recipe(master: bool) -> Recipe:
    """The recipe; ``master``: keep float32 copies of bf16 weights."""
    return Recipe("fp32", frozen="checkpoint", trained="f32", master=False)
