"""Causal attention for training: which kernel computes it, and how packed documents are kept apart.

Shapes: B batch, T tokens, H query heads, K key/value heads, D head size.

A kernel is a function (q_BHTD, k_BKTD, v_BKTD, documents) -> y_BHTD. `Kernel` names them; `choose_kernel` says which
one a device gets and why. Packed documents are described once per batch by `Documents`; a kernel that cannot mask
hands over to one that can.

Cost: causal attention does half of the score matrix; with documents, the sum over documents of half their squares.
Knows tensors; knows nothing of ranks (context.py cuts a sequence up) or of caches (the server brings its own masks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.errors import UserError
from lakh.workloads.code.batch import Batch

__all__ = ["KERNELS", "Attend", "Documents", "choose_kernel", "document_ids"]


@dataclass(frozen=True)
class Documents:
    """The documents of a packed batch, its rows laid end to end: document i is tokens starts[i] to starts[i + 1].

    `starts` is padded to a length from a short list by repeating the end, and `longest` rounded up likewise: both
    decide shapes, and a compiled kernel is made for each shape.
    """

    starts: Tensor
    longest: int

    @staticmethod
    def of(batch: Batch) -> Documents | None:
        """Those of a batch; None where whole rows are one context."""
        if batch.cu_seqlens is None:
            return None
        starts = batch.cu_seqlens
        num_padding = _round_up(len(starts) - 1, floor=64) + 1 - len(starts)
        padded = torch.cat((starts, starts[-1:].expand(num_padding)))
        return Documents(padded, min(_round_up(batch.longest, floor=128), batch.inputs.shape[1]))


Attend = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]


def document_ids(documents: Documents, rows: int, tokens: int) -> Tensor:
    """The number of the document that each token belongs to, B T; rows never share a document."""
    place = torch.arange(rows * tokens, device=documents.starts.device, dtype=torch.int32)
    return torch.searchsorted(documents.starts, place, right=True).view(rows, tokens)


def torch_choice(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, documents: Documents | None) -> Tensor:
    """torch's own choice of kernel; documents by a mask of T x T per row, which is exact and not fast."""
    gqa = q_BHTD.shape[1] != k_BKTD.shape[1]
    if documents is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=gqa)
    B, _, T, _ = q_BHTD.shape
    ids = document_ids(documents, B, T)
    mask = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
    return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, enable_gqa=gqa)


def flash(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, documents: Documents | None) -> Tensor:
    """FlashAttention 2 as built into torch; documents as sequences of variable length."""
    if documents is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q_BHTD, k_BKTD, v_BKTD, 0.0, True, False)[0]
    B, _, T, _ = q_BHTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BKTD, v_BKTD))
    starts, longest = documents.starts, documents.longest
    y = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]
    return y.view(B, T, y.shape[1], y.shape[2]).transpose(1, 2)


def cudnn(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, documents: Documents | None) -> Tensor:
    """cuDNN's fused attention; documents go to flash.

    cuDNN's own variable-length form was tried on an H200 (torch 2.11, 2026-11-15): 13 times slower, with wrong
    gradients for grouped heads.
    """
    if documents is not None:
        return flash(q_BHTD, k_BKTD, v_BKTD, documents)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q_BHTD, k_BKTD, v_BKTD, None, True, 0.0, True, False)[0]


KERNELS: dict[str, Attend] = {"torch": torch_choice, "flash": flash, "cudnn": cudnn}


def choose_kernel(wanted: str, *, device: str, bf16: bool, head_dim: int) -> tuple[Attend, str]:
    """The kernel for `wanted` ("auto" or a name of KERNELS) and the reason."""
    if wanted == "auto":
        if device != "cuda":
            return torch_choice, "torch's own: the fused kernels are for a GPU"
        if not bf16:
            return torch_choice, "torch's own: the fused kernels compute in bf16"
        return cudnn, f"cudnn: the fastest of those measured on an H200 with heads of {head_dim}"
    if wanted not in KERNELS:
        raise UserError("train.attention", f"{wanted!r} is no kernel", f"choose auto, {', '.join(KERNELS)}")
    if wanted != "torch" and (device != "cuda" or not bf16):
        where = device if device != "cuda" else "f32"
        raise UserError("train.attention", f"{wanted} does not run on {where}", "choose auto or torch")
    return KERNELS[wanted], f"{wanted}: asked for"


def _round_up(count: int, *, floor: int) -> int:
    size = floor
    while size < count:
        size *= 2
    return size
