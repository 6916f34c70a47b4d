"""One optimizer update: forward and backward over the micro-batches, clip, step.

A micro-batch's `weight` turns the sum of its losses into its part of the mean over all targets of the step; without a
weight all micro-batches count equally. FSDP averages over ranks; a pipeline runs its own schedule. With
`train.reduce_dtype = float64` gradients are summed in float64 over micro-batches and ranks, by FSDP or here: sums of so
few float32 numbers are exact, so their order does not matter.

Nothing here waits for the GPU: loss, gradient norm and `applied` are tensors. An update that is not applied leaves
weights and optimizer state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lakh.spec import Training
from lakh.trainer.optim.float64_gradients import Float64Gradients
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.objective import PLAIN, Objective
from lakh.workloads.code.parallelism.pipeline import Pipeline
from lakh.workloads.code.routing import move_bias, take_load
from lakh.workloads.replicated import ReplicatedModule

__all__ = ["Pass", "UpdateResult", "loss_sum", "objective_of", "plain_pass", "update", "uses_bf16"]

Pass = Callable[[nn.Module, Any, float | Tensor], Tensor]
"""Forward and backward of a micro-batch, with the factor of its loss: adds to the gradients and returns the loss."""


@dataclass(frozen=True)
class UpdateResult:
    loss: Tensor
    """Mean over this rank's tokens; in a pipeline the last stage has it and the other stages have 0."""
    grad_norm: Tensor
    applied: Tensor
    """True if the weights were changed."""


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    *,
    lr: float,
    clip_norm: float = 0.0,
    max_norm: float = float("inf"),
    objective: Objective = PLAIN,
    run_pass: Pass | None = None,
) -> UpdateResult:
    """Apply one update, unless the gradient norm is not finite or above `max_norm`. `clip_norm` 0 disables clipping.
    `run_pass`: forward and backward of a micro-batch; by default those of the code model with `objective`, which a
    pipeline uses in any case. Gradients of tables count in the norm if it is clipped."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    scales = [batch.scale(len(batches)) for batch in batches]
    summed_ranks: int | None = getattr(model, "summed_ranks", None)
    if summed_ranks is not None:  # gradients are summed over ranks, not averaged
        scales = [scale / summed_ranks for scale in scales]
    if isinstance(model, Pipeline):
        loss = model.run(batches, scales, objective=objective)
    else:
        run_pass = run_pass or plain_pass(objective)
        loss = torch.zeros((), device=batches[0].device)
        sums = Float64Gradients(model) if summed_ranks is not None and not isinstance(model, FSDPModule) else None
        for index, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            if isinstance(model, FSDPModule):  # reduce once, after the last micro-batch
                model.set_requires_gradient_sync(index == len(batches) - 1)
            loss += run_pass(model, batch, scale)
            if sums is not None:
                sums.add()
        if sums is not None:
            sums.store()
        loss *= summed_ranks or 1
        if isinstance(model, ReplicatedModule):
            model.reduce_gradients()
    loads = take_load(model)
    gradients = _local_gradients(model)
    tables = model if isinstance(model, ReplicatedModule) and clip_norm > 0 else None
    grad_norm = _global_norm(gradients, batches[0].device, tables.sparse_square() if tables else 0.0)
    applied = torch.isfinite(grad_norm) & (grad_norm <= max_norm)
    factor = (clip_norm / (grad_norm + 1e-6)).clamp(max=1.0) if clip_norm > 0 else torch.ones_like(grad_norm)
    if tables:
        tables.scale_sparse(factor)
    _apply(optimizer, gradients, factor, applied, in_optimizer=summed_ranks is None)
    move_bias(loads, applied)
    return UpdateResult(loss, grad_norm, applied)


@torch.no_grad()
def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of a batch's targets, for evaluation."""
    if isinstance(model, Pipeline):
        return model.run([batch], [1.0], train=False)
    return _loss(model, batch, 1.0, PLAIN)


def plain_pass(objective: Objective) -> Pass:
    """Forward and backward of one micro-batch without a CUDA graph."""

    def run_pass(model: nn.Module, batch: Batch, scale: float | Tensor) -> Tensor:
        loss = _loss(model, batch, scale, objective)
        loss.backward()
        return loss.detach()

    return run_pass


def _loss(model: nn.Module, batch: Batch, scale: float | Tensor, objective: Objective) -> Tensor:
    return model(
        batch.inputs,
        batch.positions,
        targets_BT=batch.targets,
        documents=batch.documents,
        scale=scale,
        objective=objective,
    )


def objective_of(settings: Training) -> Objective:
    return Objective(z_loss=settings.z_loss, label_smoothing=settings.label_smoothing)


def uses_bf16(settings: Training, device: torch.device) -> bool:
    return device.type == "cuda" if settings.precision == "auto" else settings.precision == "bf16"


def _local_gradients(model: nn.Module) -> dict[int, list[Tensor]]:
    """The gradients on this rank, by the number of ranks that hold the same copy."""
    gradients: dict[int, list[Tensor]] = {}
    plain_copies = model.ranks if isinstance(model, ReplicatedModule) else 1
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            copies = 1
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                assert not placement.is_partial(), "a gradient that was not summed over its ranks"
                copies *= size if placement.is_replicate() else 1
            gradients.setdefault(copies, []).append(grad.to_local())
        elif grad is not None:
            gradients.setdefault(plain_copies, []).append(grad)
    return gradients


def _global_norm(gradients: dict[int, list[Tensor]], device: torch.device, sparse_square: float = 0.0) -> Tensor:
    """The norm of the gradients over all ranks. `sparse_square`: of this rank's gradients that no parameter has.

    Each rank adds the squares of its part, divided by the number of copies; one sum over all ranks is then correct for
    shards, replicas, tensor-parallel parts and pipeline stages.
    """
    square = torch.full((), sparse_square, dtype=torch.float64, device=device)
    for copies, tensors in gradients.items():
        norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
        square += norms.double().square().sum() / copies
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(square)
    return square.sqrt().float()


def _apply(
    optimizer: torch.optim.Optimizer,
    gradients: dict[int, list[Tensor]],
    factor: Tensor,
    applied: Tensor,
    *,
    in_optimizer: bool,
) -> None:
    """Step if `applied`, with gradients scaled by `factor`.

    torch's fused AdamW reads both on the device if `in_optimizer`; it rounds the scaled gradients otherwise than a
    product does. Other optimizers get scaled gradients; with sharded parameters `applied` is read here, which waits for
    the device.
    """
    is_sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if isinstance(optimizer, torch.optim.AdamW) and not is_sharded and in_optimizer:
        optimizer.grad_scale = 1 / factor  # type: ignore[attr-defined]
    else:
        for tensors in gradients.values():
            torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
    if is_sharded and not bool(applied):
        return
    optimizer.found_inf = None if is_sharded else (~applied).float()  # type: ignore[attr-defined]
    optimizer.step()
