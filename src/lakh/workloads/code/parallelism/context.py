"""Context parallelism: one sequence cut up over ranks, keys and values gathered for attention.

With n ranks a sequence is cut into 2n pieces, and rank r takes pieces r and 2n - 1 - r (zigzag): every rank has one
early and one late piece, and so the same number of keys to look at. Everything but attention works on a token alone;
for attention the keys and values of all ranks are gathered and put in order, and a piece looks at those up to its own
end.

Cost per block and micro-batch: one gather of keys and values forward (B T K D values each, times (n - 1) / n), one sum
and scatter of their gradients backward. Memory: the keys and values of the whole sequence for one block at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lakh.workloads.code.attention import Documents, document_ids
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.parallelism.collectives import Peers, gather, sum_and_scatter

__all__ = ["cut_sequences", "piece_of"]


def cut_sequences(model: CodeModel, group: dist.ProcessGroup) -> None:
    """Make the model take whole rows and work on this rank's pieces of them."""
    peers = Peers.of(group)
    rank, ranks = dist.get_rank(group), peers.size
    model.take_piece = lambda x_BT: piece_of(x_BT, rank, ranks)
    model.pieces = ranks

    def attend(q_BHtD: Tensor, k_BKtD: Tensor, v_BKtD: Tensor, documents: Documents | None) -> Tensor:
        kv = _GatherInOrder.apply(torch.cat((k_BKtD, v_BKtD), dim=1), *peers)
        k_BKTD, v_BKTD = kv.chunk(2, dim=1)
        early, late = q_BHtD.chunk(2, dim=2)
        parts = [
            _attend_piece(q, k_BKTD, v_BKTD, piece, documents)
            for q, piece in ((early, rank), (late, 2 * ranks - 1 - rank))
        ]
        return torch.cat(parts, dim=2)

    for block in model.each_block():
        block.attention.attend = attend


def piece_of(x_BT: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's early and late piece of every row."""
    pieces = x_BT.chunk(2 * ranks, dim=1)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]), dim=1)


def _attend_piece(q: Tensor, k_all: Tensor, v_all: Tensor, piece: int, documents: Documents | None) -> Tensor:
    """Queries of piece number `piece` over all keys up to its end."""
    size = q.shape[2]
    end = (piece + 1) * size
    k, v = k_all[:, :, :end], v_all[:, :, :end]
    if documents is None and q.is_cuda and q.dtype == torch.bfloat16:  # flash lines the diagonal up at the end
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]
    mask = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(end - size)
    if documents is not None:
        ids = document_ids(documents, q.shape[0], k_all.shape[2])
        mask = mask & (ids[:, None, end - size : end, None] == ids[:, None, None, :end])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class _GatherInOrder(torch.autograd.Function):
    """This rank's two pieces -> the whole sequence in its order (dim 2); gradients are summed and go back."""

    @staticmethod
    def forward(ctx: Any, x_BKtD: Tensor, name: str, size: int) -> Tensor:
        ctx.name, ctx.size = name, size
        pairs = [part.chunk(2, dim=2) for part in gather(x_BKtD, Peers(name, size))]
        early, late = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return torch.cat((*early, *reversed(late)), dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ranks = ctx.size
        pieces = grads[0].chunk(2 * ranks, dim=2)
        parts = [torch.cat((pieces[r], pieces[2 * ranks - 1 - r]), dim=2) for r in range(ranks)]
        return sum_and_scatter(parts, Peers(ctx.name, ctx.size)), None, None
