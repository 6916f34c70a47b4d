"""Two operations of a block for CPUs, with backward passes of their own that are faster than torch's.

    blocked_attention  causal attention by blocks of queries, from batched matrix products; saves the probabilities
    swiglu             silu(gate) * up; saves the sigmoid, the expensive part, and writes both gradients in place

Shapes: B batch, T tokens, H query heads, K key/value heads, D head size, R query heads of a key head, G = B K, t
queries of a block, S keys up to its end.

Forward and backward of 8 x 256 tokens with 6 and 2 heads of 32 (2026-11-16): 28 ms on two Neoverse-N1 cores, torch's
attention 39 ms (one thread: 45 and 76), because torch recomputes the probabilities, in small matrix products. On a
Xeon, for which torch has a specialized kernel, torch is faster (4 threads: 14 and 7), so `prefers_blocked_attention`
depends on the machine. The price is memory, T / 2 probabilities for each token and head: a layer that would save more
than SAVED_BYTES uses torch's kernel.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from lakh.workloads.code.attention import Documents, document_ids, sdpa_attention

__all__ = ["blocked_attention", "prefers_blocked_attention", "swiglu"]

SAVED_BYTES = 64 << 20
BLOCK = 64


def prefers_blocked_attention() -> bool:
    """Decided by the CPU architecture alone, so that every rank and every run computes the same numbers."""
    return platform.machine() == "aarch64"


def blocked_attention(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, documents: Documents | None) -> Tensor:
    B, T, H, _ = q_BTHD.shape
    saved_bytes = B * H * T * T // 2 * q_BTHD.element_size()
    if saved_bytes > SAVED_BYTES or q_BTHD.dtype not in (torch.float32, torch.float64):
        return sdpa_attention(q_BTHD, k_BTKD, v_BTKD, documents)
    ids_BT = None if documents is None else document_ids(documents, B, T)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    return _BlockedAttention.apply(q, k, v, ids_BT).transpose(1, 2)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        B, H, T, D = q_BHTD.shape
        K = k_BKTD.shape[1]
        q_GRTD = (q_BHTD * D**-0.5).reshape(B * K, H // K, T, D)
        k_GTD, v_GTD = (x.reshape(B * K, T, D) for x in (k_BKTD, v_BKTD))
        y_GRTD = torch.empty_like(q_GRTD)
        saved = []
        for begin in range(0, T, BLOCK):
            end = min(begin + BLOCK, T)
            scores_GRtS = _with_each_key(_rows(q_GRTD, begin, end), k_GTD, end)
            _mask(scores_GRtS.view(B, K, H // K, end - begin, end), begin, ids_BT)
            p_GRtS = torch.softmax(scores_GRtS, dim=-1)
            y_GRTD[:, :, begin:end] = torch.bmm(p_GRtS, v_GTD[:, :end]).view(B * K, H // K, -1, D)
            saved.append(p_GRtS)
        ctx.save_for_backward(q_GRTD, k_GTD, v_GTD, *saved)
        return y_GRTD.view(B, H, T, D)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q_GRTD, k_GTD, v_GTD, *saved = ctx.saved_tensors
        G, R, T, D = q_GRTD.shape
        B, H = grads[0].shape[:2]
        grad_y = grads[0].reshape(G, R, T, D)
        grad_q, grad_k, grad_v = torch.empty_like(q_GRTD), torch.zeros_like(k_GTD), torch.zeros_like(v_GTD)
        for begin, p_GRtS in zip(range(0, T, BLOCK), saved, strict=True):
            end = min(begin + BLOCK, T)
            rows = _rows(grad_y, begin, end)
            grad_p = _with_each_key(rows, v_GTD, end)
            grad_scores = torch._softmax_backward_data(grad_p, p_GRtS, -1, p_GRtS.dtype)
            grad_v[:, :end].baddbmm_(p_GRtS.mT, rows)
            grad_k[:, :end].baddbmm_(grad_scores.mT, _rows(q_GRTD, begin, end))
            grad_q[:, :, begin:end] = torch.bmm(grad_scores, k_GTD[:, :end]).view(G, R, -1, D)
        heads = (B, G // B, T, D)
        return grad_q.mul_(D**-0.5).view(B, H, T, D), grad_k.view(heads), grad_v.view(heads), None


def _rows(x_GRTD: Tensor, begin: int, end: int) -> Tensor:
    """The queries of a block, with the heads of a group stacked."""
    return x_GRTD[:, :, begin:end].reshape(x_GRTD.shape[0], -1, x_GRTD.shape[3])


def _with_each_key(rows: Tensor, keys_GTD: Tensor, end: int) -> Tensor:
    """Each row times each of the first `end` keys. BLAS parallelizes a product only if the second factor is
    contiguous."""
    return torch.bmm(rows, keys_GTD[:, :end].mT.contiguous())


def _mask(scores_BKRtS: Tensor, begin: int, ids_BT: Tensor | None) -> None:
    """Keys after a query and those of other documents get no weight."""
    queries, keys = scores_BKRtS.shape[-2:]
    is_later = torch.ones(queries, queries, dtype=torch.bool).triu(1)
    scores_BKRtS[..., begin:].masked_fill_(is_later, float("-inf"))
    if ids_BT is not None:
        is_other = ids_BT[:, begin:keys, None] != ids_BT[:, None, :keys]
        scores_BKRtS.masked_fill_(is_other[:, None, None], float("-inf"))


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up; gate and up are the halves of the last dim."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        ctx.save_for_backward(gate_and_up, sigmoid)
        return (gate * sigmoid).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate_and_up, sigmoid = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both = torch.empty_like(gate_and_up)
        grad_gate, grad_up = both.chunk(2, dim=-1)
        silu = torch.mul(gate, sigmoid, out=grad_up)
        # silu' = sigmoid + silu (1 - sigmoid)
        torch.addcmul(sigmoid, silu, sigmoid, value=-1.0, out=grad_gate)
        grad_gate.add_(silu).mul_(up).mul_(grads[0])
        grad_up.mul_(grads[0])
        return both
