"""Learning-rate schedules, value for value those of Hugging Face's ``get_scheduler``."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of the step.

    ``kind``: ``linear``, ``cosine``, ``constant``, ``constant_with_warmup`` or ``wsd`` (warm-up, stable, decay:
    the last ``decay_steps`` fall linearly). ``min_ratio``: what is left of the peak at the end.
    """

    kind: str
    peak: float
    total: int
    warmup: int = 0
    decay_steps: int = 0
    min_ratio: float = 0.0

    def at(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 1."""
        k = step - 1  # Hugging Face counts the steps already taken
        if self.kind == "constant":
            return self.peak
        if k < self.warmup:
            return self.peak * k / max(1, self.warmup)
        if self.kind == "constant_with_warmup":
            return self.peak
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * self._falling(k))

    def _falling(self, k: int) -> float:
        """From 1 at the end of warm-up to 0 at the end of the run."""
        if self.kind == "wsd":
            start = self.total - self.decay_steps
            return 1.0 if k < start else max(0.0, (self.total - k) / max(1, self.decay_steps))
        progress = (k - self.warmup) / max(1, self.total - self.warmup)
        if self.kind == "linear":
            return max(0.0, 1.0 - progress)
        if self.kind == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        raise ValueError(f"schedule {self.kind}")
