"""Optimizers, one file each: builders of the graphs that a step ends with (``surogate.compile.groups.Optimizer``)."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

from surogate.compile.groups import Optimizer


def optimizers() -> list[str]:
    """Names of all optimizers: their files."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def make_optimizer(name: str, **options: Any) -> Optimizer:
    """The optimizer of that name with those of the options that it has; ``KeyError`` lists those that exist."""
    if name not in optimizers():
        raise KeyError(f"optimizer {name}: known are {', '.join(optimizers())}")
    make = importlib.import_module(f"{__name__}.{name}").make
    known = {f.name for f in dataclasses.fields(make)}
    made: Optimizer = make(**{n: v for n, v in options.items() if n in known})
    return made
