"""The loss of the code model: next-token cross-entropy in nats, with and without the logits in memory at once.

Shapes: N tokens, W width, V vocabulary (of this rank, where the head is cut up over ranks).

`linear_cross_entropy` takes the hidden states and the head's weight, and goes through the tokens in pieces: a piece's
logits become its loss and, at once, its gradient, and are gone. No logits are kept or computed twice; the backward
pass only scales what is there. Cost: three matrix products per piece, as plain autograd; memory: one piece of logits
(LOGIT_BYTES), the gradient of the hidden states, and that of the head in float32.

What is asked of the logits besides the next token is an `Objective` (objective.py). Targets of IGNORED do not count.
With `group`, each rank holds a part of the vocabulary, and the sums over it are made over the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.objective import PLAIN, Objective

__all__ = ["linear_cross_entropy", "next_token_loss"]

LOGIT_BYTES = 1 << 30


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, *, reduction: str = "mean") -> Tensor:
    """Computed in float32 whatever the logits are: the sum over a vocabulary needs it."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction=reduction, ignore_index=IGNORED
    )


def linear_cross_entropy(
    x_NW: Tensor,
    weight_VW: Tensor,
    targets_N: Tensor,
    *,
    scale: float | Tensor,
    objective: Objective = PLAIN,
    group: dist.ProcessGroup | None = None,
    logit_bytes: int = LOGIT_BYTES,
) -> Tensor:
    """`scale` times the sum of the losses.

    Products are made in the type of x_NW, whatever the type the weight is kept in.
    """
    return _LinearCrossEntropy.apply(x_NW, weight_VW, targets_N, scale, objective, group, logit_bytes)


def _rows_of_a_piece(x_NW: Tensor, weight_VW: Tensor, logit_bytes: int) -> int:
    """Tokens whose logits fit into `logit_bytes`, evened out over the pieces."""
    most = max(1, logit_bytes // (weight_VW.shape[0] * x_NW.element_size()))
    pieces = -(-x_NW.shape[0] // most)
    return -(-x_NW.shape[0] // pieces)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        weight_VW: Tensor,
        targets_N: Tensor,
        scale: float | Tensor,
        objective: Objective,
        group: dist.ProcessGroup | None,
        logit_bytes: int,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        weight = weight_VW.to(x_NW.dtype)
        scale_ = scale if isinstance(scale, Tensor) else torch.full((), scale, device=x_NW.device)
        total = torch.zeros((), dtype=torch.float32, device=x_NW.device)
        grad_x = torch.empty_like(x_NW) if needs_x else None
        grad_weight: Tensor | None = None
        rows = _rows_of_a_piece(x_NW, weight, logit_bytes)
        score = _scorer(x_NW.device) if group is None else _score_over(group, weight_VW.shape[0])
        for at in range(0, x_NW.shape[0], rows):
            x = x_NW[at : at + rows]
            loss, grad = score(x @ weight.T, targets_N[at : at + rows], scale_, objective)
            total += loss
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[at : at + rows])
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
        return grad_x, grad_weight, None, None, None, None, None


def _score(logits: Tensor, targets: Tensor, scale: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Scaled sum of the losses of some tokens, and its gradient with respect to their logits, in their place.

    Each logit is raised to the power of e once, which is most of what this costs a CPU.
    """
    z_loss, smoothing = objective.z_loss, objective.label_smoothing
    scores = logits.float()
    counts = targets != IGNORED
    target = targets.clamp_min(0)[:, None]
    top = scores.amax(-1, keepdim=True)
    scores -= top
    right = scores.gather(-1, target).squeeze(-1)
    mean = scores.mean(-1) if smoothing else 0.0
    exponents = scores.exp_()
    sums = exponents.sum(-1)
    log_sum_of_shifted = sums.log()
    log_sum = log_sum_of_shifted + top.squeeze(-1)
    losses = log_sum_of_shifted - (1.0 - smoothing) * right - smoothing * mean + z_loss * log_sum * log_sum
    loss = torch.where(counts, losses, 0.0).sum() * scale
    weight = torch.where(counts, scale, 0.0)
    grad = exponents.mul_((weight / sums * (1.0 + 2.0 * z_loss * log_sum))[:, None])
    grad.scatter_add_(-1, target, (smoothing - 1.0) * weight[:, None])
    if smoothing:
        grad -= (smoothing / logits.shape[-1]) * weight[:, None]
    return loss, grad.to(logits.dtype)


def _scorer(device: torch.device) -> Any:
    """`_score`, on a GPU as a kernel."""
    if device.type != "cuda":
        return _score
    from lakh.workloads.code.kernels import triton as kernels

    return kernels.score_rows_


def _score_over(group: dist.ProcessGroup, width: int) -> Any:
    """`_score` where this rank holds the columns [rank * width, (rank + 1) * width) of the logits."""
    first, vocabulary = dist.get_rank(group) * width, dist.get_world_size(group) * width

    def score(logits: Tensor, targets: Tensor, scale: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        z_loss, smoothing = objective.z_loss, objective.label_smoothing
        logits_f32 = logits.float()
        top = logits_f32.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        exponents = (logits_f32 - top[:, None]).exp()
        counts = targets != IGNORED
        target = targets.clamp_min(0) - first
        is_here = (target >= 0) & (target < width)
        target = target.clamp(0, width - 1)
        right = torch.where(is_here, logits_f32.gather(-1, target[:, None]).squeeze(-1), 0.0)
        aims = (1.0 - smoothing) * right  # the logits, weighted as the targets are
        if smoothing:
            aims += smoothing / vocabulary * logits_f32.sum(-1)
        sums = torch.stack((exponents.sum(-1), aims))
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log() + top
        losses = log_sum - sums[1] + z_loss * log_sum * log_sum
        loss = torch.where(counts, losses, 0.0).sum() * scale
        weight = torch.where(counts, scale, 0.0)[:, None]
        probability = exponents / sums[0][:, None] * (1.0 + 2.0 * z_loss * log_sum)[:, None]
        columns = torch.arange(width, device=logits.device)
        hit = (columns == target[:, None]) & is_here[:, None]
        even = smoothing / vocabulary
        aimed = torch.where(hit, 1.0 - smoothing + even, even)
        return loss, ((probability - aimed) * weight).to(logits.dtype)

    return score


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, summed in float32, in the place of total."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    product = torch.mm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else (a @ b).float()
    return product if total is None else total.add_(product)
