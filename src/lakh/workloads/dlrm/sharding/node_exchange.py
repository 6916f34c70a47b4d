"""Exchange of table-row-wise tables, in two levels.

    forward    partial sums: reduce-scatter inside the node of the table, then all-to-all between the nodes
    backward   gradients: all-to-all between the nodes, then all-gather inside the node of the table

Between nodes a sample's pooled embedding travels once, not once for each rank that holds rows of it. The ranks with the
same place in their nodes exchange with each other. The reduce-scatter is an all-to-all and a sum in the order of the
ranks, so that it has the same bits as the exchange of one level, on every backend.

Legend: N nodes of L ranks, B samples of a rank, C columns of a node's tables.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.spec.embedding import CommDtype
from lakh.workloads.dlrm.sharding.codec import decode, encode, row_bytes
from lakh.workloads.dlrm.sharding.columns import add_columns, take_columns
from lakh.workloads.dlrm.sharding.layout import ShardLayout
from lakh.workloads.dlrm.sharding.network import CountedGroup, SentBytes

__all__ = ["NodeExchange"]


class NodeExchange:
    def __init__(self, layout: ShardLayout, rank: int, sent: SentBytes, timeout_s: float) -> None:
        """A collective: it creates process groups."""
        self._layout, size = layout, layout.node_size
        self._nodes = len(layout.nodes)
        self._own = layout.nodes[rank // size]
        self._moves = layout.moves_to_node(rank)
        self._mine = layout.in_node[rank].columns
        timeout = timedelta(seconds=timeout_s)
        for node in range(self._nodes):  # every rank creates every group, in the same order
            members = range(node * size, (node + 1) * size)
            group = dist.new_group(list(members), timeout=timeout)
            if rank in members:
                self._inside = CountedGroup(members, rank, size, sent, group)
        for place in range(size):
            members = range(place, layout.ranks, size)
            group = dist.new_group(list(members), timeout=timeout)
            if rank in members:
                self._across = CountedGroup(members, rank, size, sent, group)

    def return_pooled(self, what: str, dtype: CommDtype, partial_MC: Tensor | None, batch: int, out_BC: Tensor) -> None:
        """Add the partial sums of all samples inside the node, and send each to the rank of its sample, which puts it
        into `out_BC`. `partial_MC`: of this rank's parts, None if it has none."""
        size, widths, columns = self._inside.size, self._own.widths, self._own.columns
        total = torch.empty(0, dtype=torch.uint8, device=out_BC.device)
        if columns:
            sums = torch.zeros(self._layout.ranks * batch, columns, device=out_BC.device)
            if partial_MC is not None:
                add_columns(partial_MC, self._moves, sums)
            by_place = sums.view(self._nodes, size, batch, columns).transpose(0, 1).reshape(-1, columns)
            block = self._nodes * batch * row_bytes(dtype, widths)
            got = self._inside.all_to_all(
                what, encode(dtype, by_place, widths).reshape(-1), [block] * size, [block] * size
            )
            values = decode(dtype, got.view(size * self._nodes * batch, -1), widths)
            first, *others = values.view(size, -1, columns).unbind()
            for other in others:
                first = first + other
            total = encode(dtype, first, widths).reshape(-1)
        sizes = [batch * row_bytes(dtype, parts.widths) for parts in self._layout.nodes]
        received = self._across.all_to_all(what, total, [sizes[self._across.index]] * self._nodes, sizes)
        for parts, coded in zip(self._layout.nodes, received.split(sizes), strict=True):
            if parts.columns:
                add_columns(decode(dtype, coded.view(batch, -1), parts.widths), parts.moves, out_BC)

    def send_gradients(self, what: str, dtype: CommDtype, grad_BC: Tensor) -> Tensor | None:
        """The gradients of all samples for this rank's parts; None if it has none."""
        batch, nodes = len(grad_BC), self._layout.nodes
        coded = [
            encode(dtype, take_columns(grad_BC, parts.moves), parts.widths).reshape(-1)
            for parts in nodes
            if parts.columns
        ]
        sizes = [batch * row_bytes(dtype, parts.widths) for parts in nodes]
        own = sizes[self._across.index]
        received = self._across.all_to_all(what, torch.cat(coded), sizes, [own] * self._nodes)
        if not self._own.columns:
            return None
        gathered = self._inside.all_gather(what, received)  # by place in the node, node, sample
        values = decode(dtype, gathered.view(self._layout.ranks * batch, -1), self._own.widths)
        by_rank = values.view(self._inside.size, self._nodes, batch, -1).transpose(0, 1)
        if not self._mine:
            return None
        return take_columns(by_rank.reshape(self._layout.ranks * batch, -1), self._moves)
