"""One optimizer update: forward and backward over the micro-batches, clip, step.

Every micro-batch has the same number of tokens, so the mean of their means is the mean over all tokens, on any
number of ranks; FSDP averages over ranks, and we over micro-batches.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lakh.spec import Run
from lakh.trainer.optim import learning_rate, set_learning_rate
from lakh.workloads.code.loss import next_token_loss

__all__ = ["Updated", "autocast", "mean_loss", "update"]


@dataclass(frozen=True)
class Updated:
    loss: Tensor  # mean over this rank's tokens
    grad_norm: Tensor
    lr: float
    applied: bool


def update(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[tuple[Tensor, Tensor]], step: int
) -> Updated:
    """Apply step number `step` (from 0). A gradient that is not finite leaves the weights untouched."""
    lr = learning_rate(step, run.optim, run.train.steps)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=micro_batches[0][0].device)
    for index, (inputs, targets) in enumerate(micro_batches):
        if isinstance(model, FSDPModule):  # reduce once, after the last micro-batch
            model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        part = mean_loss(run, model, inputs, targets) / len(micro_batches)
        part.backward()
        loss += part.detach()
    grad_norm = _clip(model, run.optim.clip_norm)
    applied = bool(torch.isfinite(grad_norm))
    if applied:
        optimizer.step()
    return Updated(loss, grad_norm, lr, applied)


def mean_loss(run: Run, model: nn.Module, inputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    with autocast(run, model, inputs.device):
        logits = model(inputs)
    return next_token_loss(logits, targets, reduction=reduction)


def autocast(run: Run, model: nn.Module, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 for a model on one rank; FSDP casts by its own policy."""
    if uses_bf16(run, device) and not isinstance(model, FSDPModule):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def uses_bf16(run: Run, device: torch.device) -> bool:
    if run.train.precision == "auto":
        return device.type == "cuda"
    return run.train.precision == "bf16"


def _clip(model: nn.Module, max_norm: float) -> Tensor:
    limit = max_norm if max_norm > 0 else float("inf")
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
