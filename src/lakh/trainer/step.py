"""One optimizer update: forward and backward over the micro-batches, clip, step.

A micro-batch's `weight` turns the sum of its losses into its part of the mean over all counted targets of the step;
without one every micro-batch counts equally many. FSDP averages over ranks, a pipeline runs its own schedule.

Nothing here waits for the GPU: loss, gradient norm and whether the update was applied are tensors, to be read when it
suits the reader. An update that is not applied leaves weights and moments untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lakh.spec import Run
from lakh.trainer.graphs import Graphed, Pass
from lakh.trainer.optim import learning_rate, set_learning_rate
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.objective import PLAIN, Objective
from lakh.workloads.code.parallelism.pipeline import Pipeline

__all__ = ["Updated", "loss_sum", "objective_of", "plain_pass", "update", "uses_bf16"]


@dataclass(frozen=True)
class Updated:
    loss: Tensor
    """Mean over this rank's tokens; over the ranks of a pipeline, known to the last stage alone and 0 elsewhere."""
    grad_norm: Tensor
    lr: float
    applied: Tensor
    """True where the weights were changed."""


def update(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    step: int,
    max_norm: float = float("inf"),
    graphed: Graphed | None = None,
) -> Updated:
    """Apply step number `step` (from 0), unless the gradient norm is not finite or above `max_norm`."""
    lr = learning_rate(step, run.optim, run.train.steps)
    set_learning_rate(optimizer, lr)
    if graphed is None:
        optimizer.zero_grad(set_to_none=True)
    else:
        optimizer.zero_grad(set_to_none=False)  # a recording adds to them where they are
    scales = [_scale(batch, len(batches)) for batch in batches]
    if isinstance(model, Pipeline):
        loss = model.run(batches, scales, objective=objective_of(run))
    else:
        loss = torch.zeros((), device=batches[0].inputs.device)
        for index, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            if isinstance(model, FSDPModule):  # reduce once, after the last micro-batch
                model.set_requires_gradient_sync(index == len(batches) - 1)
            loss += (graphed or plain_pass(objective_of(run)))(model, batch, scale)
    parts = _held_gradients(model)
    grad_norm = _norm(parts, batches[0].inputs.device)
    applied = torch.isfinite(grad_norm) & (grad_norm <= max_norm)
    clip_norm = run.optim.clip_norm
    factor = (clip_norm / (grad_norm + 1e-6)).clamp(max=1.0) if clip_norm > 0 else torch.ones_like(grad_norm)
    _apply(optimizer, parts, factor, applied)
    return Updated(loss, grad_norm, lr, applied)


@torch.no_grad()
def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of a batch's counted targets: for evaluation."""
    if isinstance(model, Pipeline):
        return model.run([batch], [1.0], train=False)
    return _loss(model, batch, 1.0, PLAIN)


def plain_pass(objective: Objective) -> Pass:
    """Forward and backward of one micro-batch, started kernel by kernel."""

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
        documents=Documents.of(batch),
        scale=scale,
        objective=objective,
    )


def _scale(batch: Batch, micro_batches: int) -> float:
    return 1 / (batch.targets.numel() * micro_batches) if batch.weight is None else batch.weight


def objective_of(run: Run) -> Objective:
    return Objective(z_loss=run.train.z_loss, label_smoothing=run.train.label_smoothing)


def uses_bf16(run: Run, device: torch.device) -> bool:
    if run.train.precision == "auto":
        return device.type == "cuda"
    return run.train.precision == "bf16"


def _held_gradients(model: nn.Module) -> dict[int, list[Tensor]]:
    """What this rank holds of the gradients, by how many ranks hold the same."""
    parts: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            copies = 1
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                assert not placement.is_partial(), "a gradient that was not summed over its ranks"
                copies *= size if placement.is_replicate() else 1
            parts.setdefault(copies, []).append(grad.to_local())
        elif grad is not None:
            parts.setdefault(1, []).append(grad)
    return parts


def _norm(parts: dict[int, list[Tensor]], device: torch.device) -> Tensor:
    """The global norm of the gradients.

    Each rank adds the squares of what it holds, divided by how many ranks hold the same; one sum over all ranks then
    serves every cut: shards, copies, parts of matrices and pipeline stages.
    """
    square = torch.zeros((), dtype=torch.float64, device=device)
    for copies, tensors in parts.items():
        norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
        square += norms.double().square().sum() / copies
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(square)
    return square.sqrt().float()


def _apply(optimizer: torch.optim.Optimizer, parts: dict[int, list[Tensor]], factor: Tensor, applied: Tensor) -> None:
    """Step where `applied`, with gradients scaled by `factor`.

    torch's fused AdamW reads both on the device and scales on the way. Others get scaled gradients; parameters that are
    cut up must be asked about `applied` here, which waits for the device.
    """
    cut_up = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if isinstance(optimizer, torch.optim.AdamW) and not cut_up:
        optimizer.grad_scale = 1 / factor  # type: ignore[attr-defined]
    else:
        for tensors in parts.values():
            torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
    if cut_up and not bool(applied):
        return
    optimizer.found_inf = None if cut_up else (~applied).float()  # type: ignore[attr-defined]
    optimizer.step()
