"""Bytes that a layer's element-wise kernels read and write, counted from the operations of a block.

Norms, residuals, dropout, rotary positions, the activation of the feed-forward, routing, casts to narrow types; bf16
activations. The scores of attention that is not fused are counted with attention (steptime.py). Knows no hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.planner.layout import Layout
from lakh.planner.shape import Array, Shape

__all__ = ["Elementwise", "elementwise"]

WIDTH_BYTES = (
    22.0  # per token: two norms (read 2, write 2), two residual additions with dropout (read 4, write 2, mask 1)
)
# Rotary positions read and write queries and keys; heads of latent attention are also put together there from a part
# with a position and one without. Norms of queries and keys read and write them once more.
ROTARY_BYTES = 4.0
PERMUTE_BYTES = 8.0  # gather rows for the experts and scatter them back, per routed copy
# Experts with biases and clamped gates (GPT-OSS), per routed copy; Megatron-Core 0.15 does both outside its fused
# kernels (moe/experts.py, fused_bias_geglu.py). Its probabilities are float32, and so is a bias times one of them.
CLAMP_BYTES = 16.0  # clamp both halves of the gate (read 4, write 4), join them (read 4, write 4)
_BIAS_BYTES = (
    28.0  # bias x probability (write 4), sum (read 6, write 4), joined (read 4, write 4), cast (read 4, write 2)
)
# Backward: cast (6), gradients of output (6, joined 4), bias (12) and probability (12); clamps (12), joined (8).
_BIAS_BACKWARD_BYTES = 60.0
EXPERT_BIAS_BYTES = (CLAMP_BYTES + _BIAS_BYTES + _BIAS_BACKWARD_BYTES) / 3  # as one of three equal passes
EAGER_BYTES = 3.0  # times all of it when each operation is its own kernel: float32 norms, rotary positions, gates


@dataclass(frozen=True)
class Elementwise:
    forward_bytes: Array
    """Of one layer's forward pass on one rank; the backward pass moves twice as many."""
    again_bytes: Array
    """What the backward pass computes again, where the layout repeats parts of a layer and not all of it."""


def elementwise(sh: Shape, lo: Layout, tokens: Array) -> Elementwise:
    """For so many tokens of a micro-batch on one rank, averaged over dense and mixture layers."""
    split = np.where(lo.sequence_parallel, lo.tp, 1.0)  # what norms and residuals are divided by
    h = sh.width
    moe = sh.moe_layers / sh.layers
    active_f = np.where(moe > 0, (1 - moe) * sh.ffn + moe * (sh.top_k + sh.shared_experts) * sh.expert_ffn, sh.ffn)
    gate_bytes = 2.0 * (2 + np.asarray(sh.gated))
    moved = tokens * (h * WIDTH_BYTES / split + active_f * gate_bytes / lo.tp)
    copy_bytes = np.where(lo.node_dispatch, PERMUTE_BYTES, 2 * PERMUTE_BYTES)  # a plain exchange sorts again on arrival
    copy_bytes = copy_bytes + np.asarray(sh.expert_bias) * EXPERT_BIAS_BYTES
    copies = tokens * moe * sh.top_k
    moved = moved + copies * h * copy_bytes
    moved = moved + np.where(np.asarray(lo.low_precision) > 0, tokens * (h * 6 + active_f * 3 / lo.tp), 0.0)
    moved = moved * np.where(lo.eager, EAGER_BYTES, 1.0)
    # Programs without fused attention have learned positions; of eager ones the factor above has the rotary ones.
    rotates = np.asarray(lo.flash, dtype=bool) & ~np.asarray(lo.eager, dtype=bool)
    heads = (sh.heads + sh.kv_heads) * (sh.head_dim + np.where(sh.is_mla, sh.rope_dim, 0.0)) / lo.tp
    rotary = np.where(rotates, tokens * heads * ROTARY_BYTES * (1 + np.asarray(sh.qk_norm)), 0.0)
    activation = copies * (sh.expert_ffn * gate_bytes + np.asarray(sh.expert_bias) * h * CLAMP_BYTES)
    latent = np.where(sh.is_mla, lo.repeats_latent, 0.0)
    again = latent * rotary + np.asarray(lo.repeats_activation) * activation
    return Elementwise(moved + rotary, again)
