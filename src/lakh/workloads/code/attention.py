"""Causal attention for training: the available kernels, and how packed documents are kept apart.

Shapes: B batch, T tokens, H query heads, K key/value heads, D head size.

A kernel is a function (q_BTHD, k_BTKD, v_BTKD, documents) -> y_BTHD. `choose_kernel` returns the kernel for a device
and the reason. Packed documents are described once per batch by `Documents`; a kernel that cannot mask falls back to
one that can. Layers with a sliding window, bounded scores or a scale of their own (`AttentionVariant`) call
`variant_attention`.

Cost: causal attention computes half of the score matrix; with documents, the sum over documents of half their squares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.errors import UserError
from lakh.spec.model import Model

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionVariant",
    "Documents",
    "attend_masked",
    "choose_kernel",
    "document_ids",
    "in_chunks",
    "sdpa_attention",
    "variant_attention",
]


@dataclass(frozen=True)
class Documents:
    """The documents of a packed batch, its sequences laid end to end: document i is tokens starts[i] to starts[i + 1].

    `starts` is padded by repeating the end, and `longest` is rounded up: both decide shapes, and compilation is per
    shape.
    """

    starts: Tensor
    longest: int

    @staticmethod
    def padded(starts: Tensor, longest: int, sequence: int) -> Documents:
        """Documents that begin at `starts` (int32, with the end of the last one) in sequences of `sequence` tokens."""
        num_padding = max(64, _next_power_of_2(len(starts) - 1)) + 1 - len(starts)
        padded = torch.cat((starts, starts[-1:].expand(num_padding)))
        return Documents(padded, min(max(128, _next_power_of_2(longest)), sequence))


AttentionKernel = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]


@dataclass(frozen=True)
class AttentionVariant:
    """What distinguishes the attention of a layer from plain causal attention."""

    window: int | None = None
    """Tokens that a query attends to: its own and those before it; None for all."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(D)."""
    softcap: float | None = None
    """Bound of the scores."""
    has_sinks: bool = False
    """Every head has a learned score (its sink) that takes a share of the softmax and adds nothing to the output."""
    is_chunked: bool = False
    """The window begins at the last position that is a multiple of it: a token attends to its chunk."""

    @property
    def signed_window(self) -> int:
        """The window as the native library has it: 0 for none, below 0 for chunks."""
        return (self.window or 0) * (-1 if self.is_chunked else 1)

    @property
    def needs_scores(self) -> bool:
        """Fused kernels cannot compute it: it takes the whole score matrix."""
        return self.softcap is not None or self.has_sinks

    @staticmethod
    def of(spec: Model, layer: int) -> AttentionVariant | None:
        """None for plain causal attention."""
        scale = None if spec.query_scale in (None, spec.head_dim) else float(spec.query_scale) ** -0.5
        if spec.score_scale not in (None, spec.head_dim**-0.5):
            scale = spec.score_scale
        if spec.latent is not None:  # a head of the cache is larger than the head that is attended with
            factor = spec.rope_scaling.score_factor if spec.rope_scaling is not None else None
            scale = (spec.head_dim + spec.rope_dim) ** -0.5 * (factor or 1.0)
        window, has_chunks = spec.window(layer), spec.traits.has_chunks
        if has_chunks and window is not None and window >= spec.context:
            window = None
        is_chunked = has_chunks and window is not None
        variant = AttentionVariant(window, scale, spec.attention_softcap, spec.traits.has_sinks, is_chunked)
        return None if variant == AttentionVariant() else variant


def document_ids(documents: Documents, num_sequences: int, tokens: int) -> Tensor:
    """The number of the document that each token belongs to, B T; sequences never share a document."""
    place = torch.arange(num_sequences * tokens, device=documents.starts.device, dtype=torch.int32)
    return torch.searchsorted(documents.starts, place, right=True).view(num_sequences, tokens)


def in_chunks(documents: Documents | None, like: Tensor, tokens: int, size: int) -> Documents:
    """The chunks of `size` tokens of every document, as documents of their own, in sequences of `tokens` tokens."""
    total = len(like) * tokens
    place = torch.arange(total, device=like.device, dtype=torch.int32)
    if documents is None:
        position, most = place % tokens, len(like) * -(-tokens // size)
    else:
        ids = torch.searchsorted(documents.starts, place, right=True)
        position, most = place - documents.starts[ids - 1], min(total, len(documents.starts) + total // size)
    starts = torch.where(position % size == 0, place, total).sort().values[:most]  # as many as there may be: no sync
    return Documents(torch.cat((starts, starts.new_full((1,), total))).to(torch.int32), min(size, tokens))


def sdpa_attention(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, documents: Documents | None) -> Tensor:
    """torch's scaled_dot_product_attention; documents by a T x T mask per sequence, which is exact but slow."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    gqa = q.shape[1] != k.shape[1]
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)
    ids = document_ids(documents, *q_BTHD.shape[:2])
    mask = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa).transpose(1, 2)


def variant_attention(
    q_BTHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    documents: Documents | None,
    variant: AttentionVariant,
    sinks_H: Tensor | None = None,
    plain: AttentionKernel = sdpa_attention,
) -> Tensor:
    """Attention of a variant by a T x T mask, which is exact but slow; `plain` where a sequence fits the window, and
    for chunks, which are documents of their own.

    A window alone uses flash attention in bf16 on a GPU.
    """
    B, T, _, D = q_BTHD.shape
    if variant == AttentionVariant(scale=D**-0.5):
        return plain(q_BTHD, k_BTKD, v_BTKD, documents)
    if not variant.needs_scores and variant.scale is None and variant.window is not None:
        if variant.window >= T:
            return plain(q_BTHD, k_BTKD, v_BTKD, documents)
        if variant.is_chunked:
            return plain(q_BTHD, k_BTKD, v_BTKD, in_chunks(documents, q_BTHD, T, variant.window))
        if q_BTHD.is_cuda and q_BTHD.dtype == torch.bfloat16:
            return _flash_window(q_BTHD, k_BTKD, v_BTKD, documents, variant.window)
    place = torch.arange(T, device=q_BTHD.device)
    mask = place[:, None] >= place
    if variant.window is not None:
        mask &= place[:, None] < place + variant.window
    if documents is not None:
        ids = document_ids(documents, B, T)
        mask = (mask & (ids[:, :, None] == ids[:, None, :]))[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    return attend_masked(q, k, v, mask, variant, sinks_H).transpose(1, 2)


def attend_masked(
    q_BHtD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    mask: Tensor | None,
    variant: AttentionVariant,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention where `mask` (broadcastable to B H t T) is true, with the variant's scale, bound of scores and sinks.

    Torch's fused kernels cannot do the latter two, so these cost the whole score matrix.
    """
    scale = q_BHtD.shape[-1] ** -0.5 if variant.scale is None else variant.scale
    if not variant.needs_scores:
        gqa = q_BHtD.shape[1] != k_BKTD.shape[1]
        return F.scaled_dot_product_attention(q_BHtD, k_BKTD, v_BKTD, attn_mask=mask, scale=scale, enable_gqa=gqa)
    share = q_BHtD.shape[1] // k_BKTD.shape[1]
    k, v = (x.repeat_interleave(share, dim=1) for x in (k_BKTD, v_BKTD))
    scores = (q_BHtD @ k.mT).float() * scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _flash_window(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, documents: Documents | None, window: int) -> Tensor:
    B, T, H, D = q_BTHD.shape
    starts, longest = (None, T) if documents is None else (documents.starts, documents.longest)
    parts = (q_BTHD, k_BTKD, v_BTKD) if documents is None else (x.flatten(0, 1) for x in (q_BTHD, k_BTKD, v_BTKD))
    y = torch.ops.aten._flash_attention_forward(
        *parts, starts, starts, longest, longest, 0.0, True, False, window_size_left=window - 1, window_size_right=0
    )[0]
    return y.view(B, T, H, D)


def flash_attention(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, documents: Documents | None) -> Tensor:
    """FlashAttention 2 as built into torch; documents as sequences of variable length."""
    if documents is None:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0].transpose(1, 2)
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTKD, v_BTKD))
    starts, longest = documents.starts, documents.longest
    y = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]
    return y.view(*q_BTHD.shape[:2], *y.shape[1:])


def cudnn_attention(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, documents: Documents | None) -> Tensor:
    """cuDNN's fused attention. Packed documents go to flash attention: cuDNN's variable-length form on an H200 (torch
    2.11, 2026-11-15) was 13 times slower, with wrong gradients for grouped heads."""
    if documents is not None:
        return flash_attention(q_BTHD, k_BTKD, v_BTKD, documents)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    y = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)[0]
    return y.transpose(1, 2)


CUDNN_HEAD_DIM = 128  # cuDNN's backward pass for larger heads depends on the GPU and its version

KERNELS: dict[str, AttentionKernel] = {"torch": sdpa_attention, "flash": flash_attention, "cudnn": cudnn_attention}


def choose_kernel(wanted: str, *, device: str, bf16: bool, head_dim: int) -> tuple[AttentionKernel, str, str]:
    """The kernel for `wanted` ("auto" or a key of KERNELS), its name and the reason."""
    if wanted == "auto":
        if device != "cuda":
            return sdpa_attention, "torch", "the fused kernels need a GPU"
        if not bf16:
            return sdpa_attention, "torch", "the fused kernels compute in bf16"
        if head_dim > CUDNN_HEAD_DIM:
            return flash_attention, "flash", f"heads of {head_dim} are larger than {CUDNN_HEAD_DIM}"
        return cudnn_attention, "cudnn", f"the fastest kernel measured on an H200 with heads of {head_dim}"
    if wanted not in KERNELS:
        raise UserError("train.attention", f"unknown kernel {wanted!r}", f"choose auto, {', '.join(KERNELS)}")
    if wanted != "torch" and (device != "cuda" or not bf16):
        where = device if device != "cuda" else "f32"
        raise UserError("train.attention", f"{wanted} does not run on {where}", "choose auto or torch")
    return KERNELS[wanted], wanted, "requested"


def _next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()
