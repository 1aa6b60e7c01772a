"""Recipes: in which dtype weights are stored. One file each; the CPU computes in float32 whatever they say."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """``frozen``: dtype of weights that do not train; ``checkpoint`` keeps bf16 where the file has it, which loses
    nothing. ``trained``: dtype of model weights that train (adapters are always f32). ``master``: with bf16 weights,
    keep an f32 copy that takes the updates; without it the update is rounded stochastically. ``activation``: dtype of
    activations on a GPU."""

    name: str
    frozen: str
    trained: str
    master: bool = True
    activation: str = "f32"


def get_recipe(name: str, *, master: bool = True, device: str = "cpu") -> Recipe:
    """The recipe of that name; ``KeyError`` lists those that exist. ``auto`` is ``fp32`` on the CPU, else ``bf16``."""
    known = {i.name: i for i in pkgutil.iter_modules(__path__)}
    if name == "auto":
        name = "fp32" if device == "cpu" else "bf16"
    if name not in known:
        raise KeyError(f"recipe {name}: known are {', '.join(sorted(known))}")
    recipe: Recipe = importlib.import_module(f"{__name__}.{name}").recipe(master)
    return recipe
