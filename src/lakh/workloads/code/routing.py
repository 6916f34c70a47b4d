"""Routing of tokens to experts: token choice, two ways to spread the load over the experts, and a bound on it.

Scores of experts are a softmax, or sigmoids (arXiv 2412.19437), to which a bias is added for the choice. A token may be
limited to the experts of some groups.

    balance_loss   an auxiliary loss, E sum_e f_e P_e of each micro-batch: f_e is the share of tokens that expert e got,
                   P_e its mean probability (arXiv 2101.03961)
    balance_bias   a bias on the scores that choose experts, not on their weights: after every step it moves by a fixed
                   amount towards an even load, without a gradient of the loss (arXiv 2408.15664)
    capacity       a bound on the tokens of an expert, in training: choices beyond it are dropped (arXiv 2006.16668)

The first two enter through the backward pass (`_Balanced`): the auxiliary loss as the gradient of the scores, the
uneven load as the "gradient" of the bias. So gradient accumulation, FSDP, context and pipeline parallelism sum them as
they sum any gradient, and the loss that is reported stays that of the tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lakh.spec.model import Experts
from lakh.workloads.code.ops import ModelOps, local

__all__ = ["move_bias", "route", "take_load"]

EVEN = 1e-5
"""A share of the load this close to the mean is even: sums over ranks round differently."""


def route(
    experts: Experts, ops: ModelOps, logits_NE: Tensor, bias_E: Tensor | None, *, is_sigmoid: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights and numbers `N K` of each token's experts, and in training the share of choices that each expert got."""
    logits_NE = logits_NE.float()
    scores_NE = logits_NE.sigmoid() if is_sigmoid else logits_NE.softmax(dim=-1)
    chosen = scores_NE if bias_E is None else scores_NE.detach() + bias_E.detach()
    if is_sigmoid and bias_E is None:
        chosen = logits_NE  # sigmoids of large numbers are equal
    if experts.groups > 1:
        chosen = ops.limit_groups(chosen, experts.groups, experts.top_groups)
    index_NK = chosen.topk(experts.top_k, dim=-1).indices
    weight_NK = scores_NE.gather(-1, index_NK)
    if experts.normalize:
        weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
    if experts.weight_scale != 1.0:
        weight_NK = weight_NK * experts.weight_scale
    if not torch.is_grad_enabled():
        return weight_NK, index_NK, None
    numbers_E = torch.arange(experts.count, device=index_NK.device)
    # Compared and not scattered: on a GPU thousands of additions to each of a few numbers wait for each other.
    share_E = (index_NK.flatten()[:, None] == numbers_E).sum(0) / index_NK.numel()
    if experts.balance_loss or bias_E is not None:
        factor, moves_bias = experts.balance_loss * ops.balance_scale, experts.balance_bias > 0
        if is_sigmoid and experts.balance_loss:
            scores_NE = scores_NE / scores_NE.sum(dim=-1, keepdim=True)
        weight_NK = _Balanced.apply(weight_NK, scores_NE, bias_E, ops.mean_load(share_E), factor, moves_bias)
    if experts.capacity:
        weight_NK = weight_NK * _within_capacity(experts, weight_NK.detach(), index_NK)
    return weight_NK, index_NK, share_E


def _within_capacity(experts: Experts, weight_NK: Tensor, index_NK: Tensor) -> Tensor:
    """Which choices an expert takes: those with the largest weights, up to its capacity."""
    most = math.ceil(experts.capacity * index_NK.numel() / experts.count)
    by_weight = weight_NK.flatten().argsort(descending=True, stable=True)
    experts_S, by_expert = index_NK.flatten()[by_weight].sort(stable=True)
    numbers_E = torch.arange(experts.count, device=index_NK.device)
    starts_E = torch.searchsorted(experts_S, numbers_E)
    place_S = torch.arange(len(experts_S), device=index_NK.device) - starts_E[experts_S]
    taken = torch.empty_like(place_S, dtype=torch.bool)
    taken[by_weight[by_expert]] = place_S < most
    return taken.view_as(index_NK)


class _Balanced(torch.autograd.Function):
    """The weights as they are; backward adds the gradients of the auxiliary loss and of the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_NK: Tensor,
        scores_NE: Tensor,
        bias_E: Tensor | None,
        share_E: Tensor,
        factor: float,
        moves_bias: bool,
    ) -> Tensor:
        ctx.save_for_backward(share_E)
        ctx.factor, ctx.shape, ctx.moves_bias = factor, scores_NE.shape, moves_bias
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        return weight_NK.view_as(weight_NK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (share_E,) = ctx.saved_tensors
        tokens, count = ctx.shape
        grad_scores = (ctx.factor * count / tokens * share_E).expand(tokens, count) if ctx.factor else None
        grad_bias = None
        if ctx.bias_dtype is not None:  # one that does not move has a gradient of 0: trained parameters have one
            grad_bias = ((share_E - 1 / count) * ctx.moves_bias).to(ctx.bias_dtype)
        return grad_outputs[0], grad_scores, grad_bias, None, None, None


def take_load(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """The biases of a model's routers, and their changes towards an even load. Their gradients become 0, so that they
    neither count in the gradient norm nor reach the optimizer."""
    found = []
    for module in model.modules():
        experts: Experts | None = getattr(getattr(module, "spec", None), "experts", None)
        bias = getattr(getattr(module, "ffn", None), "router_bias", None)
        if experts is None or bias is None or bias.weight.grad is None:
            continue
        above = local(bias.weight.grad)
        is_uneven = above.abs() > EVEN
        found.append((bias.weight, above.sign() * is_uneven * -experts.balance_bias))
        bias.weight.grad.zero_()
    return found


@torch.no_grad()
def move_bias(changes: list[tuple[nn.Parameter, Tensor]], applied: Tensor) -> None:
    """Change the biases, if the update was `applied`."""
    for bias, change in changes:
        local(bias).add_(change * applied)
