"""Inner products of all pairs of a sample's vectors, the interaction of DLRM.

On a CPU the pairs alone are computed, by numba: a batched matrix product computes each of them twice and its result
must be gathered. Sums have a fixed order, so the result has the same bits on every CPU.

Legend: B samples, F vectors, W values of a vector, P pairs (i, j) with j < i, row by row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lakh.compiled import compiled

__all__ = ["pair_products"]


def pair_products(x_BFW: Tensor) -> Tensor:
    """B x P inner products. W is a multiple of 4."""
    if x_BFW.device.type == "cpu" and x_BFW.dtype == torch.float32:
        return _PairProducts.apply(x_BFW)
    rows, columns = torch.tril_indices(x_BFW.shape[1], x_BFW.shape[1], offset=-1, device=x_BFW.device)
    return (x_BFW @ x_BFW.mT)[:, rows, columns]


class _PairProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BFW: Tensor) -> Tensor:
        x_BFW = x_BFW.contiguous()
        ctx.save_for_backward(x_BFW)
        batch, vectors, _ = x_BFW.shape
        out_BP = torch.empty(batch, vectors * (vectors - 1) // 2)
        _products(x_BFW.detach().numpy(), out_BP.numpy())
        return out_BP

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x_BFW,) = ctx.saved_tensors
        grad_BFW = torch.zeros_like(x_BFW)
        _gradients(x_BFW.detach().numpy(), grads[0].contiguous().numpy(), grad_BFW.numpy())
        return grad_BFW


@compiled
def _products(x_BFW, out_BP):
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    for b in range(len(x_BFW)):
        x_FW, out_P = x_BFW[b], out_BP[b]
        p = 0
        for i in range(len(x_FW)):
            left_W = x_FW[i]
            for j in range(i):
                right_W = x_FW[j]
                s0 = s1 = s2 = s3 = np.float32(0)
                for vector in range(len(left_W) // 4):
                    w = np.uint64(vector) * four
                    s0 += left_W[w] * right_W[w]
                    s1 += left_W[w + one] * right_W[w + one]
                    s2 += left_W[w + two] * right_W[w + two]
                    s3 += left_W[w + three] * right_W[w + three]
                out_P[p] = (s0 + s1) + (s2 + s3)
                p += 1


@compiled
def _gradients(x_BFW, grad_BP, out_BFW):
    for b in range(len(x_BFW)):
        x_FW, grad_P, out_FW = x_BFW[b], grad_BP[b], out_BFW[b]
        p = 0
        for i in range(len(x_FW)):
            left_W, out_left_W = x_FW[i], out_FW[i]
            for j in range(i):
                right_W, out_right_W = x_FW[j], out_FW[j]
                gradient = grad_P[p]
                for w in range(len(left_W)):
                    out_left_W[w] += gradient * right_W[w]
                for w in range(len(left_W)):
                    out_right_W[w] += gradient * left_W[w]
                p += 1
