"""Collectives of a group of ranks, with the bytes that this rank sends to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CountedGroup", "SentBytes"]


@dataclass
class SentBytes:
    """Bytes that this rank has sent to others, by what they are."""

    total: Counter[str] = field(default_factory=Counter)
    between_nodes: Counter[str] = field(default_factory=Counter)
    """Those of them that left the node."""


class CountedGroup:
    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        node_size: int,
        sent: SentBytes,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` None: the default group, of all ranks."""
        self.members, self._sent, self._group = tuple(members), sent, group
        self.index = self.members.index(rank)
        """Place of this rank in the group."""
        node = rank // node_size
        self._is_peer = [member != rank for member in members]
        self._is_outside = [member // node_size != node for member in members]

    @property
    def size(self) -> int:
        return len(self.members)

    def all_to_all(
        self, what: str, values: Tensor, sizes: list[int], out_sizes: list[int], group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Send `sizes[i]` values to member i, one after the other; returns what all members sent. `group`: another
        process group of the same members."""
        out = torch.empty(sum(out_sizes), dtype=values.dtype, device=values.device)
        dist.all_to_all_single(out, values, out_sizes, sizes, group=group or self._group)
        self._count(what, [size * values.element_size() for size in sizes])
        return out

    def all_gather(self, what: str, values: Tensor) -> Tensor:
        """The values of all members, one after the other along the first dimension."""
        gathered = values.new_empty(self.size * len(values), *values.shape[1:])
        dist.all_gather(list(gathered.chunk(self.size)), values.contiguous(), group=self._group)
        self._count(what, [values.nbytes] * self.size)
        return gathered

    def _count(self, what: str, sizes: list[int]) -> None:
        self._sent.total[what] += sum(size for size, is_peer in zip(sizes, self._is_peer, strict=True) if is_peer)
        outside = sum(size for size, is_outside in zip(sizes, self._is_outside, strict=True) if is_outside)
        self._sent.between_nodes[what] += outside
