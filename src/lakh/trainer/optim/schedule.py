"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from lakh.spec import Optimizer

__all__ = ["learning_rate"]


def learning_rate(step: int, settings: Optimizer, total_steps: int) -> float:
    """Linear warm-up to lr, then by `schedule` down to min_lr_ratio * lr at the last step. `step` counts from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    begin, last = settings.warmup_steps, total_steps - 1
    if settings.schedule == "wsd":
        begin = max(begin, total_steps - max(1, round(settings.decay_share * total_steps)))
    if settings.schedule == "constant" or step < begin:
        return settings.lr
    progress = min(1.0, (step - begin) / max(1, last - begin))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)
