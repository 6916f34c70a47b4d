"""Bytes that a layer's element-wise kernels read and write, counted from the operations of a block.

Norms, residuals, dropout, rotary positions, the activation of the feed-forward, routing, casts to narrow types; bf16
activations. The scores of unfused attention are counted in attention.py.
"""

from __future__ import annotations

import numpy as np

from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["elementwise_traffic"]

# Per token: two norms (read 2, write 2), two residual additions with dropout (read 4, write 2, mask 1).
WIDTH_BYTES = 22.0
# Rotary positions read and write queries and keys; heads of latent attention are also joined there from a part with a
# position and one without. Norms of queries and keys read and write them once more.
ROTARY_BYTES = 4.0
# PyTorch's own kernels have wide loads only for contiguous operands of one type. Where an operand is broadcast, a view
# of a half, or of another type, they take this many times as long for a byte: the best of 1, 1.5 and 2 by
# cross-validation over the fit rows.
NARROW_LOADS = 1.5
# Rotary positions in separate kernels. Forward: join halves (4), sum (6), join with what is not rotated (4), and with
# narrow loads negate a half (2), two products (8). Backward: join (4), sum (6), gradients of two slices (6 and 8), and
# with narrow loads negate (2), two products (8).
EAGER_ROTARY_BYTES = (14.0 + 24.0 + (10.0 + 10.0) * NARROW_LOADS) / 3  # as one of three equal passes
PERMUTE_BYTES = 8.0  # gather tokens for the experts and scatter them back, per routed copy
# Experts with biases and clamped gates (GPT-OSS), per routed copy; Megatron-Core 0.15 does both outside its fused
# kernels (moe/experts.py, fused_bias_geglu.py). Its probabilities are float32, and so is a bias times one of them.
CLAMP_BYTES = 8.0 * NARROW_LOADS + 8.0  # clamp both halves of the gate (read 4, write 4), join them (read 4, write 4)
# Bias x probability (write 4), sum (read 6, write 4), cast (read 4, write 2); joined (read 4, write 4).
_BIAS_BYTES = 20.0 * NARROW_LOADS + 8.0
# Backward: cast (6), gradients of output (6), bias (8) and probability (8), clamps (12); sums of these over a dimension
# (4 and 4), output joined (4), clamps joined (8).
_BIAS_BACKWARD_BYTES = 40.0 * NARROW_LOADS + 20.0
EXPERT_BIAS_BYTES = (CLAMP_BYTES + _BIAS_BYTES + _BIAS_BACKWARD_BYTES) / 3  # as one of three equal passes
EAGER_FACTOR = 3.0  # when each operation is its own kernel: float32 norms, rotary positions, gates


def elementwise_traffic(model: Model, plan: ExecutionPlan, tokens: Array) -> tuple[Array, Array]:
    """Bytes of a forward pass, and bytes that the backward pass recomputes where the plan recomputes parts of a layer.

    For `tokens` tokens of a micro-batch on one rank, averaged over dense and mixture layers. The backward pass moves
    twice as many as the forward pass.
    """
    split = np.where(plan.sequence_parallel, plan.tp, 1.0)  # norms and residuals
    width, mixture = model.width, model.mixture_layers / model.layers
    routed_ffn = (model.top_k + model.shared_experts) * model.expert_ffn
    active_ffn = np.where(mixture > 0, (1 - mixture) * model.ffn + mixture * routed_ffn, model.ffn)
    gate_bytes = 2.0 * np.asarray(model.ffn_matrices)
    # Fused experts activate and cast between two products without writing to memory.
    written_ffn = active_ffn - np.where(plan.fused_experts, mixture * model.top_k * model.expert_ffn, 0.0)
    moved = tokens * (width * WIDTH_BYTES / split + written_ffn * gate_bytes / plan.tp)
    # A plain all-to-all sorts again on arrival.
    copy_bytes = np.where(plan.node_dispatch, PERMUTE_BYTES, 2 * PERMUTE_BYTES) + model.expert_bias * EXPERT_BIAS_BYTES
    copies = tokens * mixture * model.top_k
    moved = moved + copies * width * copy_bytes
    casts = tokens * (width * 6 + written_ffn * 3 / plan.tp)
    moved = moved + np.where(np.asarray(plan.low_precision) > 0, casts, 0.0)
    moved = moved * np.where(plan.eager, EAGER_FACTOR, 1.0)
    # Programs without fused attention have learned positions; the eager factor already includes rotary ones.
    rotates = np.asarray(plan.flash, dtype=bool) & ~np.asarray(plan.eager, dtype=bool)
    heads = (model.heads + model.kv_heads) * (model.head_dim + model.rope_dim) / plan.tp
    rotary_bytes = np.where(plan.eager_rotary, EAGER_ROTARY_BYTES, ROTARY_BYTES) + ROTARY_BYTES * model.qk_norm
    rotary = np.where(rotates, tokens * heads * rotary_bytes, 0.0)
    activation = copies * (model.expert_ffn * gate_bytes + model.expert_bias * width * CLAMP_BYTES)
    latent = np.where(model.is_latent, plan.recompute_latent, 0.0)
    again = latent * rotary + np.asarray(plan.recompute_expert_activation) * activation
    return moved + rotary, again
