"""The layers of a network on the GPU for many tokens at once: the vendor's matrix products, small kernels between them.

Shapes: N tokens, W width, F ffn. Who attends to what is the caller's: a function from the fused queries, keys and
values of one layer to the attention's output. Everything here can be captured in a graph: no size depends on data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lakh.server.model.gpu import kernels
from lakh.server.model.inference import InferenceModel

__all__ = ["Attend", "run_layers"]

Attend = Callable[[Tensor, int], Tensor]
"""(fused queries, keys and values of N tokens, layer) -> N x heads*head size."""


def run_layers(network: InferenceModel, x_NW: Tensor, attend: Attend, places: Tensor | None = None) -> Tensor:
    """Scores of all tokens, or of those at `places`; x_NW is used up."""
    spec = network.spec
    delta: Tensor | None = None
    for layer in range(spec.layers):
        h = _add_norm(network, x_NW, delta, network.norms[2 * layer])
        qkv = network.norm_queries_and_keys(h @ network.matrix("qkv", layer).T, layer)
        delta = attend(qkv, layer) @ network.matrix("o", layer).T
        h = _add_norm(network, x_NW, delta, network.norms[2 * layer + 1])
        both = h @ network.matrix("gate_up", layer).T
        inner = torch.empty(len(x_NW), spec.ffn, dtype=x_NW.dtype, device=x_NW.device)
        kernels.gate[(len(x_NW), -(-spec.ffn // 1024))](both, inner, spec.ffn, BLOCK=1024)
        delta = inner @ network.matrix("down", layer).T
    if places is not None:
        assert delta is not None
        x_NW, delta = x_NW[places], delta[places]
    return _add_norm(network, x_NW, delta, network.norms[-1]) @ network.head.T


def _add_norm(network: InferenceModel, x: Tensor, delta: Tensor | None, norm: Tensor) -> Tensor:
    """x += delta, in place; returns its norm."""
    rows, width = x.shape
    y = torch.empty_like(x)
    add = delta is not None
    kernels.add_norm[(rows,)](
        x, delta if add else x, norm, y, width, network.spec.norm_eps,
        ADD=add, BLOCK=1 << (width - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return y
