"""Models: one file an architecture, found by ``model_type`` of a Hugging Face ``config.json``.

A model file defines ``MODEL_TYPE``, ``ARCHITECTURES``, ``build(config) -> CausalLM`` and ``TINY``, a small config that
the parity tests train. Nothing else has to be edited: this package lists its folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from surogate.dsl import CausalLM
from surogate.errors import UserError

ADDING_A_MODEL = "docs/adding-a-model.md"


def architectures() -> dict[str, ModuleType]:
    """Model files by ``model_type``."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "MODEL_TYPE"):
            found[module.MODEL_TYPE] = module
    return found


def build(config: Mapping[str, Any], where: str = "config.json") -> CausalLM:
    """The model that a ``config.json`` describes. Raises :class:`UserError` for what is unknown or not supported."""
    known = architectures()
    model_type = config.get("model_type")
    declared = config.get("architectures") or []
    module = known.get(str(model_type))
    if module is None or (declared and declared[0] not in module.ARCHITECTURES):
        names = ", ".join(sorted(a for m in known.values() for a in m.ARCHITECTURES))
        found = declared[0] if declared else f"model_type {model_type!r}"
        raise UserError(
            f"architecture {found} is not known",
            where=where,
            expected=f"one of {names}",
            fix=f"choose a model of a known architecture, or add this one in one file: {ADDING_A_MODEL}",
        )
    if config.get("quantization_config"):
        raise UserError(
            "this checkpoint is quantised", where=f"{where}: quantization_config", expected="bf16, fp16 or fp32 weights"
        )
    model: CausalLM = module.build(config)
    return model
