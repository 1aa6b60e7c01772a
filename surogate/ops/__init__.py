"""Ops: one file each, holding everything that Python knows of it.

An op file defines subclasses of :class:`Op` and nothing registers them by hand: importing this package lists the
folder. The native kernels carry the same names (``csrc/cpu/<file>.cpp``).
"""

from __future__ import annotations

import importlib
import pkgutil

from surogate.ops.base import Cost, Op, Sample

__all__ = ["Cost", "Op", "Sample", "all_ops", "get_op"]

_OPS: dict[str, Op] = {}


def _load() -> None:
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name == "base":
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, Op) and item.__module__ == module.__name__ and item.name:
                if item.name in _OPS:
                    raise RuntimeError(f"two ops named {item.name}")
                _OPS[item.name] = item()


def all_ops() -> dict[str, Op]:
    """Every op by name."""
    if not _OPS:
        _load()
    return _OPS


def get_op(name: str) -> Op:
    """The op of that name; ``KeyError`` if there is none."""
    return all_ops()[name]
