"""The loss of the code model: next-token cross-entropy in nats.

Shapes: N tokens, W width, V vocabulary (this rank's part, where the head is sharded).

`linear_cross_entropy` takes the hidden states and the weight of the head and goes through the tokens in chunks: the
forward pass turns a chunk of logits into its loss and its gradient, and the backward pass only scales the
gradient. Cost: three matrix products per chunk, as plain autograd; memory: one chunk of logits (LOGIT_BYTES), the
gradient of the hidden states, and that of the head in float32.

Targets of IGNORED do not count. With `group`, each rank holds a part of the vocabulary, and sums over it run over the
group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.objective import PLAIN, Objective

__all__ = ["linear_cross_entropy", "sequence_losses"]

LOGIT_BYTES = 1 << 30


def linear_cross_entropy(
    x_NW: Tensor,
    weight_VW: Tensor,
    targets_N: Tensor,
    *,
    scale: float | Tensor,
    objective: Objective = PLAIN,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    logit_bytes: int = LOGIT_BYTES,
) -> Tensor:
    """`scale` times the sum of the losses, of logits that tanh bounds to `softcap`. Matrix products are in the type of
    x_NW, whatever the weight's type."""
    return _LinearCrossEntropy.apply(x_NW, weight_VW, targets_N, scale, objective, softcap, group, logit_bytes)


def sequence_losses(x_BTW: Tensor, weight_VW: Tensor, targets_BT: Tensor, *, softcap: float | None = None) -> Tensor:
    """The sum of the losses of each sequence's targets, B. Where the head is trained, the losses are computed again in
    the backward pass: a gradient of the head for each sequence would not fit."""

    def of_one(x_TW: Tensor, targets_T: Tensor) -> Tensor:
        return linear_cross_entropy(x_TW, weight_VW, targets_T, scale=1.0, softcap=softcap)

    if not (weight_VW.requires_grad and torch.is_grad_enabled()):
        return torch.stack([of_one(*one) for one in zip(x_BTW, targets_BT, strict=True)])
    return torch.stack(
        [checkpoint(of_one, x, targets, use_reentrant=False) for x, targets in zip(x_BTW, targets_BT, strict=True)]
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        weight_VW: Tensor,
        targets_N: Tensor,
        scale: float | Tensor,
        objective: Objective,
        softcap: float | None,
        group: dist.ProcessGroup | None,
        logit_bytes: int,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        weight = weight_VW.to(x_NW.dtype)
        scale_ = scale if isinstance(scale, Tensor) else torch.full((), scale, device=x_NW.device)
        total = torch.zeros((), dtype=torch.float32, device=x_NW.device)
        grad_x = torch.empty_like(x_NW) if needs_x else None
        grad_weight: Tensor | None = None
        most = max(1, logit_bytes // (len(weight) * x_NW.element_size()))
        num_chunks = -(-len(x_NW) // most)
        size = -(-len(x_NW) // num_chunks)  # tokens of a chunk: evened out
        cross_entropy: Any = partial(_cross_entropy, group=group)
        if group is None and x_NW.device.type == "cuda":
            from lakh.workloads.code.kernels.triton import cross_entropy_ as cross_entropy
        for at in range(0, x_NW.shape[0], size):
            x = x_NW[at : at + size]
            logits = x @ weight.T
            bounded: Tensor | None = None
            if softcap is not None:
                bounded = torch.tanh(logits / softcap)
                logits = softcap * bounded
            loss, grad = cross_entropy(logits, targets_N[at : at + size], scale_, objective)
            total += loss
            if bounded is not None:
                grad *= 1 - bounded * bounded
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[at : at + size])
            if needs_weight:
                grad_weight = _add_product(grad_weight, grad.T, x)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VW.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad_loss,) = grad_outputs
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad_loss.to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None, None


def _cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor, objective: Objective, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Scaled sum of the losses, and its gradient with respect to the logits, which it overwrites.

    With `group`, rank r holds the columns [r * V, (r + 1) * V) of the logits. Each exponential is computed once: it is
    most of the cost on a CPU.
    """
    z_loss, smoothing = objective.z_loss, objective.label_smoothing
    scores = logits.float()
    counts = targets != IGNORED
    target = targets.clamp_min(0)[:, None]
    is_here: Tensor | None = None
    top = scores.amax(-1, keepdim=True)
    vocabulary = logits.shape[-1]
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        target = target - dist.get_rank(group) * vocabulary
        is_here = (target >= 0) & (target < vocabulary)
        target = target.clamp(0, vocabulary - 1)
        vocabulary *= dist.get_world_size(group)
    scores -= top
    right = scores.gather(-1, target).squeeze(-1)
    mean = scores.mean(-1) if smoothing else torch.zeros_like(right)
    exponents = scores.exp_()
    sums = exponents.sum(-1)
    if is_here is not None:
        parts = torch.stack((sums, right * is_here.squeeze(-1), mean / dist.get_world_size(group)))
        dist.all_reduce(parts, group=group)
        sums, right, mean = parts
    log_sum_of_shifted = sums.log()
    log_sum = log_sum_of_shifted + top.squeeze(-1)
    losses = log_sum_of_shifted - (1.0 - smoothing) * right - smoothing * mean + z_loss * log_sum * log_sum
    loss = torch.where(counts, losses, 0.0).sum() * scale
    weight = torch.where(counts, scale, 0.0)
    grad = exponents.mul_((weight / sums * (1.0 + 2.0 * z_loss * log_sum))[:, None])
    aimed = (smoothing - 1.0) * weight[:, None]
    grad.scatter_add_(-1, target, aimed if is_here is None else aimed * is_here)
    if smoothing:
        grad -= (smoothing / vocabulary) * weight[:, None]
    return loss, grad.to(logits.dtype)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, in place, summed in float32."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    product = torch.mm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else (a @ b).float()
    return product if total is None else total.add_(product)
