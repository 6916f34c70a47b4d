"""Communication of sharded tables: ids to the ranks that look them up, pooled embeddings back, gradients like the ids.

    ids        lengths, then ids as int32: all-to-all, each with its own sizes
    forward    pooled embeddings of the sharded tables: all-to-all, `forward_dtype`
    backward   gradients of the sharded tables: all-to-all; of the replicated ones: all-gather; `backward_dtype`
    dense      gradients of the network: all-to-all, a sum in the order of the ranks, all-gather

Table-row-wise tables have an exchange of two levels (node_exchange.py). Sums run in the order of the ranks, so that
they have the same bits on every backend. `sent` counts what this rank sends to others, by these names; what an
evaluation sends counts as "evaluation". Ids are exchanged in host memory; embeddings and gradients where their tensors
are.

Legend: B samples of a rank, C columns of a sample, P features of parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec.embedding import CommDtype
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.sharding import kernels
from lakh.workloads.dlrm.sharding.codec import decode, encode, row_bytes
from lakh.workloads.dlrm.sharding.columns import add_columns, take_columns
from lakh.workloads.dlrm.sharding.layout import RankParts, ShardLayout
from lakh.workloads.dlrm.sharding.network import CountedGroup, SentBytes
from lakh.workloads.dlrm.sharding.node_exchange import NodeExchange

__all__ = ["DistributedBags", "TableExchange"]


@dataclass(frozen=True, eq=False)
class DistributedBags:
    """The bags of a micro-batch, where they are looked up."""

    replicated: JaggedBags | None
    """This rank's samples, for the tables that every rank holds."""
    replicated_of_all: JaggedBags | None
    """The samples of all ranks, for the same tables."""
    sharded: JaggedBags | None
    """The samples of all ranks, for this rank's parts of the sharded tables."""
    batch: int
    """This rank's samples."""
    coming: tuple[DistributedBags, ...] = ()
    """The micro-batches after it, as far as they are known, for caches of rows."""

    def to(self, device: torch.device) -> DistributedBags:
        if self.device == device:
            return self
        replicated, of_all, sharded = (
            bags.to(device) if bags else None for bags in (self.replicated, self.replicated_of_all, self.sharded)
        )
        return DistributedBags(replicated, of_all, sharded, self.batch, self.coming)

    @property
    def device(self) -> torch.device:
        """Where they are looked up."""
        held = self.replicated or self.sharded
        return held.ids.device if held else torch.device("cpu")


class TableExchange:
    def __init__(
        self,
        layout: ShardLayout,
        rank: int,
        *,
        forward_dtype: CommDtype = "f32",
        backward_dtype: CommDtype = "f32",
        timeout_s: float = 300.0,
    ) -> None:
        """A collective if tables have an exchange of two levels; `timeout_s` is that of its collectives."""
        self.layout, self.rank, self.ranks = layout, rank, layout.ranks
        self._forward_dtype, self._backward_dtype = forward_dtype, backward_dtype
        self.sent = SentBytes()
        self._world = CountedGroup(range(layout.ranks), rank, layout.node_size, self.sent)
        self._nodes = NodeExchange(layout, rank, self.sent, timeout_s) if layout.nodes else None
        # Ids are in host memory, which nccl cannot send.
        is_nccl = layout.ranks > 1 and dist.is_initialized() and dist.get_backend() == "nccl"
        timeout = timedelta(seconds=timeout_s)
        self._host_group = dist.new_group(timeout=timeout, backend="gloo") if is_nccl else None
        self.steps = 0
        """Steps that `sent` counts."""
        self.input_s = 0.0
        """Seconds spent in `distribute` so far, which runs beside the computation."""
        self._rows_F = np.array([table.rows for table in layout.tables for _ in range(table.features)], np.int64)
        # What goes to a rank: its sharded parts, and the replicated tables, which all ranks update.
        self._targets = [np.concatenate([layout.replicated.lookups, part.lookups]) for part in layout.sharded]

    # --- ids ---

    def distribute(
        self, bags: JaggedBags, group: dist.ProcessGroup | None = None, *, counts_as: str = "ids"
    ) -> DistributedBags:
        """Send the ids of this rank's samples to the ranks that hold their rows. A collective."""
        began_s = time.monotonic()
        if bags.features != self.layout.features:
            found = f"has {bags.features} features, the tables have {self.layout.features}"
            raise UserError("batch", found, "check the data")
        group = group or self._host_group
        batch, copies = bags.batch, len(self.layout.replicated.lookups)
        local = self._select(bags, self.layout.replicated) if copies else None
        if self.ranks == 1:
            return DistributedBags(local, local, None, batch)
        ids, lengths, counts = self._pack(bags)
        parts = [len(target) for target in self._targets]
        own_parts = parts[self.rank]
        got_lengths = self._world.all_to_all(
            counts_as, lengths, [part * batch for part in parts], [own_parts * batch] * self.ranks, group
        )
        got_counts = got_lengths.view(self.ranks, own_parts * batch).sum(1, dtype=torch.int64).tolist()
        got_ids = self._world.all_to_all(counts_as, ids, counts, got_counts, group)
        merged = torch.empty(len(got_ids), dtype=torch.int64)
        offsets = torch.empty(own_parts * self.ranks * batch + 1, dtype=torch.int64)
        kernels.merge_ids(
            got_ids.numpy(), got_lengths.numpy(), self.ranks, own_parts, batch, merged.numpy(), offsets.numpy()
        )
        everything = JaggedBags(merged, offsets, own_parts) if own_parts else None
        self.input_s += time.monotonic() - began_s
        return DistributedBags(
            local,
            everything.select(0, copies) if everything and copies else None,
            everything.select(copies, own_parts) if everything and own_parts > copies else None,
            batch,
        )

    def _pack(self, bags: JaggedBags) -> tuple[Tensor, Tensor, list[int]]:
        sizes = bags.lengths_FB.sum(1).numpy()
        most = int(sum(sizes[target[:, 0]].sum() for target in self._targets))
        ids = np.empty(most, np.int32)
        lengths = np.empty(sum(len(target) for target in self._targets) * bags.batch, np.int32)
        at = bag = 0
        counts = []
        arguments = bags.ids.numpy(), bags.offsets.numpy(), bags.batch
        for target in self._targets:
            count, bad = kernels.pack_ids(*arguments, target, self._rows_F, ids[at:], lengths[bag:])
            if bad >= 0:
                feature = int(count) // bags.batch
                found = f"id {int(bags.ids[bad])} is not in [0, {self._rows_F[feature]})"
                where = f"feature {feature}, sample {int(count) % bags.batch}"
                raise UserError(where, found, "check the data, or enlarge the table")
            counts.append(int(count))
            at, bag = at + int(count), bag + len(target) * bags.batch
        return torch.from_numpy(ids[:at]), torch.from_numpy(lengths), counts

    def _select(self, bags: JaggedBags, parts: RankParts) -> JaggedBags:
        features = parts.lookups[:, 0].tolist()
        if features == list(range(bags.features)):
            return bags
        chosen = [bags.select(feature, feature + 1) for feature in features]
        lengths = torch.stack([one.lengths_FB[0] for one in chosen])
        return JaggedBags.of_lengths(torch.cat([one.ids for one in chosen]), lengths)

    # --- pooled embeddings and their gradients ---

    def return_pooled(
        self, pooled_MC: Tensor | None, batch: int, out_BC: Tensor, *, counts_as: str = "forward"
    ) -> None:
        """Send the pooled embeddings of all samples to their ranks, which put them into `out_BC`. A collective."""
        if self.ranks == 1:
            return
        dtype, flat, device = self._forward_dtype, self.layout.flat, out_BC.device
        own = flat[self.rank]
        sizes = [batch * row_bytes(dtype, part.widths) for part in flat]
        if any(sizes):
            mine = torch.empty(0, dtype=torch.uint8, device=device)
            if own.columns and pooled_MC is not None:
                mine = encode(dtype, pooled_MC[:, : own.columns], own.widths).reshape(-1)
            received = self._world.all_to_all(counts_as, mine, [sizes[self.rank]] * self.ranks, sizes)
            for part, coded in zip(flat, received.split(sizes), strict=True):
                if part.columns:
                    add_columns(decode(dtype, coded.view(batch, -1), part.widths), part.moves, out_BC)
        if self._nodes:
            has_part = pooled_MC is not None and pooled_MC.shape[1] > own.columns
            partial = pooled_MC[:, own.columns :].contiguous() if pooled_MC is not None and has_part else None
            self._nodes.return_pooled(counts_as, dtype, partial, batch, out_BC)

    def send_gradients(self, grad_BC: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of all samples, for the replicated tables and for this rank's parts of the others, as parts of
        the mean over all samples. A collective."""
        grad_BC = grad_BC.contiguous()
        dtype, batch, copies = self._backward_dtype, len(grad_BC), self.layout.replicated
        if self.ranks > 1:
            grad_BC = grad_BC * (1 / self.ranks)
        replicated = take_columns(grad_BC, copies.moves) if copies.columns else None
        if self.ranks == 1:
            return replicated, None
        found = [self._send_flat(grad_BC)]
        if self._nodes:
            found.append(self._nodes.send_gradients("backward", dtype, grad_BC))
        parts = [part for part in found if part is not None]
        sharded = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else None
        if replicated is not None:
            gathered = self._world.all_gather("backward", encode(dtype, replicated, copies.widths))
            replicated = decode(dtype, gathered.view(self.ranks * batch, -1), copies.widths)
        return replicated, sharded

    def _send_flat(self, grad_BC: Tensor) -> Tensor | None:
        dtype, flat, batch = self._backward_dtype, self.layout.flat, len(grad_BC)
        sizes = [batch * row_bytes(dtype, part.widths) for part in flat]
        if not any(sizes):
            return None
        coded = [
            encode(dtype, take_columns(grad_BC, part.moves), part.widths).reshape(-1) for part in flat if part.columns
        ]
        size, own = sizes[self.rank], flat[self.rank]
        received = self._world.all_to_all("backward", torch.cat(coded), sizes, [size] * self.ranks)
        return decode(dtype, received.view(self.ranks * batch, -1), own.widths) if size else None

    # --- the dense network ---

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients over the ranks, added in the order of the ranks; once per step. A collective."""
        self.steps += 1
        if self.ranks == 1:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        chunk = -(-len(flat) // self.ranks)
        padded = nn.functional.pad(flat, (0, chunk * self.ranks - len(flat)))
        sizes = [chunk] * self.ranks
        pieces = self._world.all_to_all("dense", padded, sizes, sizes)
        total, *others = pieces.view(self.ranks, chunk).unbind()
        for other in others:
            total += other
        total *= 1 / self.ranks
        averaged = self._world.all_gather("dense", total)
        for grad, value in zip(grads, averaged[: len(flat)].split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(value.view_as(grad))
