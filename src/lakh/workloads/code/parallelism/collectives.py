"""Gather, and sum and scatter, along any dim of a tensor, over any backend; torch renamed the calls in 2.13.

Operators of their own: compiled code calls them as they are, so that every collective of a step is started in one
place, over any backend, and can be counted there (trainer/traffic.py). Groups go by their name and size, which compiled
code can hold; `Peers.of` gives both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["Peers", "gather", "sum_and_scatter", "sum_over"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Peers(NamedTuple):
    """The ranks of a group."""

    name: str
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Peers:
        return Peers(group.group_name, dist.get_world_size(group))


def gather(x: Tensor, peers: Peers) -> tuple[Tensor, ...]:
    """What each rank of the group has, in their order."""
    return _gather(x, peers.size, peers.name).view(-1, *x.shape).unbind()


def sum_and_scatter(parts: list[Tensor] | tuple[Tensor, ...], peers: Peers) -> Tensor:
    """Part number r, summed over the group, on rank r."""
    return _sum_and_scatter(torch.stack([part.contiguous() for part in parts]), peers.name)


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # which some versions call by a type of its own


@torch.library.custom_op("lakh::gather", mutates_args=())
def _gather(x: Tensor, size: int, name: str) -> Tensor:
    result = x.new_empty(size * x.numel())
    _all_gather(result, x.contiguous().view(-1), group=_group(name))
    return result


@_gather.register_fake
def _(x: Tensor, size: int, name: str) -> Tensor:
    return x.new_empty(size * x.numel())


@torch.library.custom_op("lakh::sum_and_scatter", mutates_args=())
def _sum_and_scatter(parts: Tensor, name: str) -> Tensor:
    result = parts.new_empty(parts.shape[1:])  # returned itself: FSDP watches outputs, and views escape it
    _reduce_scatter(result.view(-1), parts.view(-1), group=_group(name))
    return result


@_sum_and_scatter.register_fake
def _(parts: Tensor, name: str) -> Tensor:
    return parts.new_empty(parts.shape[1:])


@torch.library.custom_op("lakh::sum_over", mutates_args=())
def sum_over(x: Tensor, name: str) -> Tensor:
    """x, summed over the group."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=_group(name))
    return total


@sum_over.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape)
