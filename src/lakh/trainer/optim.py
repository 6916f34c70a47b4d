"""The update rules, the learning rate over time, and their state under names that a checkpoint can hold.

AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest (embedding, head, norms). Both leave
weights and state untouched where `optimizer.found_inf` is 1, without asking the device what it is. State exists from
the start, so that a resumed run begins like a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lakh.spec import Optimizer

__all__ = ["Muon", "build_optimizer", "learning_rate", "named_state", "orthogonalise", "set_learning_rate"]


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


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices; the other parameters are left to the AdamW it is given.

    An update has the size that AdamW's would have (its root mean square is 0.2: arXiv 2502.16982), so both share one
    learning rate and decay. A matrix that is cut up over ranks is gathered for the orthogonalisation, which every rank
    then does by itself: exact, at the cost of one all-gather per matrix and of repeated arithmetic.
    """

    found_inf: Tensor | None = None

    def __init__(self, matrices: Sequence[nn.Parameter], others: torch.optim.AdamW, settings: Optimizer) -> None:
        super().__init__(list(matrices), {"lr": settings.lr, "weight_decay": settings.weight_decay})
        self._others, self._momentum = others, settings.momentum
        for parameter in matrices:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
        self._own = list(self.param_groups)
        self.param_groups.extend(others.param_groups)
        self.state.update(others.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._others.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._others.step()
        for group in self._own:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._turn(parameter, group["lr"], group["weight_decay"])

    def _turn(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        grad, momentum = parameter.grad, self.state[parameter]["momentum"]
        assert grad is not None
        keep = 0.0 if self.found_inf is None else self.found_inf
        # Written so that nothing changes where found_inf is 1, even if the gradient is not finite.
        grad = torch.where(torch.as_tensor(keep, device=grad.device).bool(), torch.zeros_like(grad), grad)
        momentum.lerp_(grad, (1 - self._momentum) * (1 - keep))
        ahead = momentum.lerp(grad, 1 - self._momentum)
        update = orthogonalise(ahead.full_tensor() if isinstance(ahead, DTensor) else ahead)
        update.mul_(0.2 * max(update.shape) ** 0.5)
        if isinstance(parameter, DTensor):
            update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - lr * weight_decay * (1 - keep))
        parameter.add_(update.to(parameter.dtype) * (1 - keep) * -lr)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of the matrix' singular value decomposition: a quintic Newton-Schulz iteration.

    The coefficients push small singular values up fast and leave all of them near 1 (within 0.3), which is enough
    (Keller Jordan, "Muon", 2024). In bf16 on a GPU, where matrix products are the cost; in float32 on a CPU.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.T).to(matrix.dtype).contiguous()


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that decides how training goes on, by name: model.* and optim.*"""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors
