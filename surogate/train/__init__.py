"""Training: what happens around the compiled step. Python acts between steps, never inside one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surogate.train.loop import Run, run

__all__ = ["Run", "run"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from surogate.train import loop

        return getattr(loop, name)
    raise AttributeError(name)
