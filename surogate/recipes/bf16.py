"""All model weights in bfloat16. Updates go to a float32 master copy, or are rounded stochastically: plain rounding
would lose every update smaller than 1/256 of its weight."""

from surogate.recipes import Recipe


def recipe(master: bool) -> Recipe:
    """The recipe; ``master``: keep float32 copies of bf16 weights."""
    return Recipe("bf16", frozen="bf16", trained="bf16", master=master, activation="bf16")
