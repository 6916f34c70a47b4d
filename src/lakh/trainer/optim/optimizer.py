"""The update rules, the learning rate over time, and their state under names that a checkpoint can hold.

AdamW for everything, or Muon (muon.py) for the matrices of the blocks and AdamW for the rest (embedding, head, norms).
Both leave weights and state untouched where `optimizer.found_inf` is 1, without asking the device what it is. State
exists from the start, so that a resumed run begins like a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lakh.spec import Optimizer
from lakh.trainer.optim.muon import Muon

__all__ = ["build_optimizer", "learning_rate", "named_state", "set_learning_rate"]


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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a model, with decay on matrices only."""
    named = list(model.named_parameters())
    if settings.kind == "muon":
        matrices = [p for name, p in named if p.dim() == 2 and "blocks." in name]
        turned = {id(p) for p in matrices}
        return Muon(matrices, _adamw([p for _, p in named if id(p) not in turned], settings), settings)
    return _adamw([p for _, p in named], settings)


def _adamw(parameters: Sequence[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    decayed = [p for p in parameters if p.dim() >= 2]
    plain = [p for p in parameters if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that decides how training goes on, by name: model.* and optim.*"""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors
