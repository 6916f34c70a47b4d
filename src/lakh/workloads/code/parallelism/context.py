"""Context parallelism: one sequence sharded over ranks, keys and values gathered for attention.

With n ranks a sequence is split into 2n chunks, and rank r takes chunks r and 2n - 1 - r (zigzag): each rank has one
early and one late chunk, and so the same number of keys to attend to. Only attention looks across tokens: it gathers
the keys and values of all ranks in order, and a chunk attends to those up to its own end.

Cost per block and micro-batch: one all-gather of keys and values forward (B T K D values each, times (n - 1) / n), one
reduce-scatter of their gradients backward. Memory: the keys and values of the whole sequence for one block at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.workloads.code.attention import AttentionVariant, Documents, attend_masked, document_ids, in_chunks
from lakh.workloads.code.ops import ModelOps
from lakh.workloads.code.parallelism.collectives import Peers, all_gather, all_reduce, reduce_scatter, with_gradient

__all__ = ["context_parallel_ops", "zigzag_chunks"]


def context_parallel_ops(ops: ModelOps, group: dist.ProcessGroup) -> ModelOps:
    """These operations on this rank's chunks of whole sequences."""
    peers = Peers.of(group)
    rank, ranks = dist.get_rank(group), peers.size

    def attention(
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKD: Tensor,
        documents: Documents | None,
        variant: AttentionVariant | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        kv_BtKD = torch.cat((k_BtKD, v_BtKD), dim=2)
        k_BKTD, v_BKTD = gather_in_order(kv_BtKD.transpose(1, 2), peers).chunk(2, dim=1)
        early, late = q_BtHD.transpose(1, 2).chunk(2, dim=2)
        parts = [
            _attend_chunk(q, k_BKTD, v_BKTD, chunk, documents, variant, sinks_H)
            for q, chunk in ((early, rank), (late, 2 * ranks - 1 - rank))
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    return replace(
        ops,
        attention=attention,
        variant_attention=attention,
        shard_sequence=lambda x_BT: zigzag_chunks(x_BT, rank, ranks),
        mean_load=lambda share: all_reduce(share, peers.name) / ranks,
        context_parallel=ranks,
    )


def zigzag_chunks(x_BT: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """A rank's early and late chunk of every sequence."""
    chunks = x_BT.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def _attend_chunk(
    q: Tensor,
    k_all: Tensor,
    v_all: Tensor,
    chunk: int,
    documents: Documents | None,
    variant: AttentionVariant | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Queries of chunk number `chunk` over all keys up to its end."""
    size = q.shape[2]
    end = (chunk + 1) * size
    k, v = k_all[:, :, :end], v_all[:, :, :end]
    if (
        documents is None and variant is None and q.is_cuda and q.dtype == torch.bfloat16
    ):  # flash aligns the diagonal at the end
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]
    variant = variant or AttentionVariant()
    if variant.is_chunked and variant.window is not None:
        documents = in_chunks(documents, q, k_all.shape[2], variant.window)
    mask = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(end - size)
    if documents is not None:
        ids = document_ids(documents, q.shape[0], k_all.shape[2])
        mask = mask & (ids[:, None, end - size : end, None] == ids[:, None, None, :end])
    if variant.window is not None and not variant.is_chunked:
        mask = mask & ~mask.tril(end - size - variant.window)
    return attend_masked(q, k, v, mask, variant, sinks_H)


def _gather(x_BKtD: Tensor, peers: Peers) -> Tensor:
    pairs = [part.chunk(2, dim=2) for part in all_gather(x_BKtD, peers)]
    early, late = zip(*pairs, strict=True)
    return torch.cat((*early, *reversed(late)), dim=2)


def _scatter_gradient(grad_BKTD: Tensor, peers: Peers) -> Tensor:
    return reduce_scatter([zigzag_chunks(grad_BKTD, rank, peers.size, dim=2) for rank in range(peers.size)], peers)


gather_in_order = with_gradient(_gather, _scatter_gradient)
"""The ranks' chunks to the whole sequence in order (dim 2); backward sums the gradients and scatters them."""
