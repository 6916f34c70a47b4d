"""All-gather, reduce-scatter and all-reduce for compiled code, over any backend; torch renamed the calls in 2.13.

They are custom operators: compiled code calls them unchanged, so every collective of a step starts here and can be
counted (trainer/observability/traffic.py). Compiled code cannot hold a process group, so groups are passed by name
and size (`Peers.of`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["Peers", "all_gather", "all_reduce", "reduce_scatter", "with_gradient"]

_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Peers(NamedTuple):
    """The ranks of a group."""

    name: str
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Peers:
        return Peers(group.group_name, dist.get_world_size(group))


def all_gather(x: Tensor, peers: Peers) -> tuple[Tensor, ...]:
    """The tensors of all ranks, in rank order."""
    return _all_gather(x, peers.size, peers.name).view(-1, *x.shape).unbind()


def reduce_scatter(parts: list[Tensor] | tuple[Tensor, ...], peers: Peers) -> Tensor:
    """Rank r gets part r, summed over the group."""
    return _reduce_scatter(torch.stack([part.contiguous() for part in parts]), peers.name)


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a type of its own in some versions of torch


@torch.library.custom_op("lakh::all_gather", mutates_args=())
def _all_gather(x: Tensor, size: int, name: str) -> Tensor:
    result = x.new_empty(size * x.numel())
    _gather_into(result, x.contiguous().view(-1), group=_group(name))
    return result


@_all_gather.register_fake
def _(x: Tensor, size: int, name: str) -> Tensor:
    return x.new_empty(size * x.numel())


@torch.library.custom_op("lakh::reduce_scatter", mutates_args=())
def _reduce_scatter(parts: Tensor, name: str) -> Tensor:
    result = parts.new_empty(parts.shape[1:])  # not a view: FSDP watches outputs, and views escape it
    _scatter_into(result.view(-1), parts.view(-1), group=_group(name))
    return result


@_reduce_scatter.register_fake
def _(parts: Tensor, name: str) -> Tensor:
    return parts.new_empty(parts.shape[1:])


@torch.library.custom_op("lakh::all_reduce", mutates_args=())
def all_reduce(x: Tensor, name: str) -> Tensor:
    """x summed over the group."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=_group(name))
    return total


@all_reduce.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape)


Collective = Callable[[Tensor, Peers], Tensor]


def with_gradient(forward_op: Collective, backward_op: Collective) -> Collective:
    """`forward_op`, whose gradient is `backward_op`."""

    class CollectiveWithGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
            ctx.name, ctx.size = name, size
            return forward_op(x, Peers(name, size))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward_op(grads[0], Peers(ctx.name, ctx.size)), None, None

    def call(x: Tensor, peers: Peers) -> Tensor:
        return CollectiveWithGradient.apply(x, peers.name, peers.size)

    return call
