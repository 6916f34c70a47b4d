"""Seconds of attention scores and values of one layer's forward pass on one rank.

Fused kernels compute the causal half of the score matrix at a calibrated share of the peak; unfused attention computes
all of it and writes it to memory.
"""

from __future__ import annotations

import numpy as np

from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.stacked import Array
from lakh.planner.timing.efficiency import Efficiency
from lakh.spec.gpu import Gpu
from lakh.spec.model import Model

__all__ = ["attention_s"]

USUAL_HEAD_DIM = 128.0
HALF_SPEED_TOKENS = 256.0  # tokens of a context-parallel piece at which fused attention reaches half of its speed
BLOCK_TOKENS = 128.0  # queries of a block of fused attention
UNFUSED_SCORE_BYTES = 13.0  # write scores; softmax read and write; dropout read, write and mask; read for the values


def attention_s(model: Model, plan: ExecutionPlan, gpu: Gpu, efficiency: Efficiency, tokens: Array) -> Array:
    """For `tokens` tokens of a micro-batch on one rank."""
    per_key = 4 * tokens * model.score_dim / plan.tp  # FLOPs of one key for all queries
    flops = per_key * model.attended_tokens(plan.sequence)
    kernel = np.where(plan.native_attention, gpu.traits.attention_gain, 1.0)
    kernel = kernel * _product_share(model.head_dim, gpu) / _product_share(USUAL_HEAD_DIM, gpu)
    fused = per_key * _keys_computed(model, plan.sequence) / (gpu.sustained_FLOPs * efficiency.attention * kernel)
    narrow = 1 - _product_share(model.head_dim, gpu) * efficiency.low_precision / (1 + efficiency.low_precision)
    fused = fused * np.where(plan.narrow_attention, narrow, 1.0)  # fp8 shortens the products, not the exponentials
    # A ring of cp ranks works on two pieces per rank, and short pieces fill a GPU badly.
    piece = plan.sequence / (2 * plan.cp)
    fused = fused * np.where(np.asarray(plan.cp) > 1, 1 + HALF_SPEED_TOKENS / piece, 1.0)
    scores = tokens * plan.sequence * model.heads / plan.tp
    reached = efficiency.gemm * model.head_dim / (model.head_dim + efficiency.gemm_knee)
    unfused = flops / (gpu.sustained_FLOPs * reached)
    unfused = unfused + scores * UNFUSED_SCORE_BYTES / (gpu.memory_Bps * efficiency.memory)
    return np.where(plan.flash, fused, unfused)


def _keys_computed(model: Model, sequence: Array) -> Array:
    """Keys per query that a fused kernel computes, averaged over full and sliding-window layers.

    A block of queries reads the window of its first and of its last query, so one block of keys more than the window;
    and a loop over so few keys is short.
    """
    full = sequence / 2
    window = model.window_tokens + BLOCK_TOKENS + HALF_SPEED_TOKENS
    return (1 - model.window_share) * full + model.window_share * np.minimum(window, full)


def _product_share(head_dim: Array, gpu: Gpu) -> Array:
    """Share of fused attention's time in matrix products: small heads have more exponentials per FLOP."""
    return head_dim / (head_dim + gpu.traits.softmax_head_dim)
