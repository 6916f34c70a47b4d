"""The layers of a model on the GPU for many tokens: cuBLAS products with small Triton kernels between them.

Shapes: N tokens, W width. Attention is the caller's: a function from the fused queries, keys and values of one layer to
the attention output. All shapes are static, so a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lakh.server.model.gpu import kernels
from lakh.server.model.inference import InferenceModel
from lakh.workloads.code.ops import ModelOps

__all__ = ["QkvAttention", "run_layers"]

QkvAttention = Callable[[Tensor, int], Tensor]
"""(fused queries, keys and values of N tokens, layer) -> N x heads*head size."""


def run_layers(network: InferenceModel, x_NW: Tensor, attend: QkvAttention, positions: Tensor | None = None) -> Tensor:
    """Logits of all tokens, or of those at `positions`; overwrites x_NW."""

    def fused_attention(qkv_NX: Tensor, layer: int) -> Tensor:
        return attend(network.norm_queries_and_keys(qkv_NX, layer), layer)

    ops = ModelOps(norm_add=_norm_add, fused_attention=fused_attention, activation=_swiglu, linear=network.linear)
    x_NW, delta_NW = network.run_blocks(x_NW, ops, network.ropes)
    if positions is not None:
        x_NW, delta_NW = x_NW[positions], delta_NW[positions]
    return network.logits(_norm_add(x_NW, delta_NW, network.norms[-1], network.spec.norm_eps)[1])


def _norm_add(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x += delta, in place; returns it and its norm."""
    tokens, width = x.shape
    y = torch.empty_like(x)
    kernels.add_norm[(tokens,)](
        x, x if delta is None else delta, weight, y, width, eps, None,
        ADD=delta is not None, BLOCK=1 << (width - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return x, y


def _swiglu(gate_up: Tensor) -> Tensor:
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    inner = torch.empty(tokens, ffn, dtype=gate_up.dtype, device=gate_up.device)
    kernels.swiglu[(tokens, -(-ffn // 1024))](gate_up, inner, ffn, BLOCK=1024)
    return inner
