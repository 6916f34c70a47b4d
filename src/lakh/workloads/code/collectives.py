"""Gather, and sum and scatter, along any dim of a tensor, over any backend; torch renamed the calls in 2.13."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather", "sum_and_scatter"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """What each rank of the group has, in their order."""
    result = x.new_empty(dist.get_world_size(group) * x.numel())
    _all_gather(result, x.contiguous().view(-1), group=group)
    return result.view(-1, *x.shape).unbind()


def sum_and_scatter(parts: list[Tensor] | tuple[Tensor, ...], group: dist.ProcessGroup) -> Tensor:
    """Part number r, summed over the group, on rank r."""
    result = parts[0].new_empty(parts[0].shape)  # returned itself: FSDP watches outputs, and views escape it
    _reduce_scatter(result.view(-1), torch.cat([part.reshape(-1) for part in parts]), group=group)
    return result
