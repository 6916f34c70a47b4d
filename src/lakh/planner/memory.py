"""Memory of the fullest GPU: states, gathered layers, activations in flight, logits, and allocator fragmentation.

Counted per pipeline stage: the first stage has the most micro-batches in flight, the last stage has the logits; the
fullest one counts. Where the layers do not divide, the first and last stage have one layer less, because they hold the
embedding and the head (Llama 3 does so, arXiv 2407.21783, section 3.3.2); the second stage may then be the fullest.
Activations follow the tensors that a block's backward pass needs (arXiv 2205.05198 for the plain block), generalised to
grouped queries, gated feed-forward, experts and latent attention. Works on one execution plan or a million.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lakh.planner.execution_plan import FULL, HALF, NONE, SELECTIVE, ExecutionPlan
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["OPTIMIZER_BYTES", "MemoryUse", "expert_copies", "memory_use", "stage_experts", "stage_parameters"]

# Bytes of optimizer state per parameter, including the master copy where there is one.
OPTIMIZER_BYTES = {"adamw": 12.0, "adamw-8bit": 6.0, "adamw-bf16": 4.0, "muon": 8.0, "sgd": 8.0}

CONTEXT_BYTES = 2.0 * 2**30  # CUDA context, communicator buffers, workspaces of matrix products
# What a caching allocator cannot reuse, as a share of activations and temporary buffers. All micro-batches of a
# pipeline allocate the same sizes, so each reuses the blocks of an earlier one and only one counts. This does not hold
# where each operation is its own kernel, whose temporaries separate the blocks that stay.
FRAGMENTATION = 0.08
LOGIT_BYTES = 10.0  # bf16 logits, their float32 copy and its gradient


@dataclass(frozen=True)
class MemoryUse:
    """Parts that add up to `total_bytes`, on the fullest GPU."""

    weights_bytes: Array
    gradients_bytes: Array
    optimizer_bytes: Array
    gathered_bytes: Array
    """Layers that FSDP has gathered for use."""
    activations_bytes: Array
    logits_bytes: Array
    fragmentation_bytes: Array
    context_bytes: Array

    @property
    def total_bytes(self) -> Array:
        return sum(getattr(self, f.name) for f in fields(self))


# --- parameters of a pipeline stage ---


def stage_parameters(model: Model, plan: ExecutionPlan) -> Array:
    """Parameters of the fullest pipeline stage on one tensor rank, before sharding over data ranks."""
    blocks = model.parameters - model.table_weights - model.routed_expert_weights
    most_layers = np.ceil(model.layers / plan.pp)
    fullest = blocks / (plan.tp * model.layers / most_layers) + stage_experts(model, plan)
    tables = np.where(np.asarray(plan.pp) > 1, model.vocab * model.width, model.table_weights)
    with_table = fullest * (1 - _is_uneven(model, plan) / most_layers) + tables / plan.tp
    return np.maximum(fullest, with_table)


def _is_uneven(model: Model, plan: ExecutionPlan) -> Array:
    """1 where the layers do not divide over the stages: the first and last stage then have a layer less."""
    return (np.asarray(model.layers) % plan.pp > 0) * 1.0


def stage_experts(model: Model, plan: ExecutionPlan) -> Array:
    """Parameters of routed experts, as part of `stage_parameters`."""
    stages = model.layers / np.ceil(model.layers / plan.pp)
    return model.routed_expert_weights / (stages * plan.ep * np.where(plan.whole_experts, 1.0, plan.tp))


def expert_copies(plan: ExecutionPlan) -> Array:
    """Ranks that hold the same experts and share their gradients and states."""
    return np.maximum(plan.gpus / (plan.pp * plan.ep * np.where(plan.whole_experts, 1.0, plan.tp)), 1.0)


# --- memory ---


def in_flight(plan: ExecutionPlan, stage: Array) -> Array:
    """Most micro-batches whose activations a stage (0 is the first) keeps: its warm-up and the one in progress.

    GPipe: all. 1F1B: one per later stage. Interleaved: each chunk but the last of a whole round, and `chunks_ahead`
    chunks per later stage (Megatron-LM's and torch's schedules: 2). Expert exchanges that overlap with computation need
    a second micro-batch, which a pipeline has anyway.
    """
    pp, count = np.asarray(plan.pp, dtype=float), np.maximum(plan.micro_batches, 1.0)
    chunks = np.maximum(np.asarray(plan.chunks, dtype=float), 1.0)
    ahead = np.where(chunks > 1, plan.chunks_ahead, 1.0)
    kept = (chunks - 1) * np.minimum(pp, count) + ahead * np.maximum(pp - 1 - stage, 0.0) + 1
    kept = kept + np.where(np.asarray(plan.expert_overlap, dtype=bool) & (pp == 1), 1.0, 0.0)
    extra = np.where(stage < pp - 1, plan.extra_warm_up, 0.0)
    return np.where(plan.gpipe, count, np.minimum(kept / chunks + extra, count))


def memory_use(model: Model, plan: ExecutionPlan) -> MemoryUse:
    weights, gradients, optimizer, gathered = _state_bytes(model, plan)
    stage_layers, uneven = np.ceil(model.layers / plan.pp), _is_uneven(model, plan)
    layer, kept = _activation_bytes(model, plan)
    # One layer is recomputed at a time; selective recomputation produces only what it did not keep.
    again = np.where(np.asarray(plan.recompute) == SELECTIVE, layer - kept, layer)
    recomputed = np.where(np.asarray(plan.recompute) == NONE, 0.0, again)
    per_micro_batch = stage_layers * kept
    at_the_ends = (stage_layers - uneven) * kept  # the first and the last stage
    second = per_micro_batch * in_flight(plan, 1.0) * uneven
    early = np.maximum(at_the_ends * in_flight(plan, 0.0), second) + recomputed
    last = at_the_ends * in_flight(plan, np.asarray(plan.pp) - 1) + recomputed
    logits = plan.micro_batch * plan.sequence / plan.cp * model.vocab / plan.tp * LOGIT_BYTES
    is_early = (np.asarray(plan.pp) > 1) & (early > last + logits)
    logits = np.where(is_early, 0.0, logits)
    activations = np.where(is_early, early, last)
    reused = np.where(plan.eager, activations, per_micro_batch + recomputed)
    return MemoryUse(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        gathered_bytes=gathered,
        activations_bytes=activations,
        logits_bytes=logits,
        fragmentation_bytes=FRAGMENTATION * (reused + logits + gathered),
        context_bytes=CONTEXT_BYTES + np.zeros(np.shape(activations)),
    )


def _state_bytes(model: Model, plan: ExecutionPlan) -> tuple[Array, Array, Array, Array]:
    """Weights, gradients, optimizer states, and weights gathered for use.

    A pipeline with sharded data ranks keeps the gathered weights and whole gradients of its stage through the step.
    Experts are sharded only over the ranks that hold the same ones.
    """
    params, experts, copies = stage_parameters(model, plan), stage_experts(model, plan), expert_copies(plan)
    dense = params - experts
    shard, zero = np.maximum(np.asarray(plan.shard, dtype=float), 1.0), np.asarray(plan.zero)
    is_sharded, is_pipelined = shard > 1, np.asarray(plan.pp) > 1
    owners = np.where(is_sharded, shard, np.where(zero >= 1, plan.data_ranks * plan.cp, 1.0))
    own_weights = dense / shard + experts / np.minimum(shard, copies)
    own_states = dense / owners + experts / np.minimum(owners, copies)
    stage_layers = np.ceil(model.layers / plan.pp)
    two_layers = 2 * (params / stage_layers * 2.0)
    gathered = np.where(is_sharded, np.where(is_pipelined, params * 2.0, two_layers), 0.0)
    whole = np.where(is_pipelined, params, own_weights)
    chunks = np.maximum(np.asarray(plan.chunks, dtype=float), 1.0)
    in_progress = params * np.minimum(2 / np.where(is_pipelined, chunks, stage_layers), 1.0)
    gradients = np.where(zero >= 2, np.minimum(own_states + in_progress, whole), whole)
    trained = np.where(plan.adapters, 0.0, 1.0)
    optimizer = trained * np.where(plan.offload, 0.0, own_states * plan.optimizer_bytes)
    return own_weights * plan.weight_bytes, gradients * plan.gradient_bytes * trained, optimizer, gathered


def _activation_bytes(model: Model, plan: ExecutionPlan) -> tuple[Array, Array]:
    """Bytes that one layer produces for one micro-batch, and the part kept until the backward pass."""
    tokens = plan.micro_batch * plan.sequence / plan.cp
    split = np.where(plan.sequence_parallel, plan.tp, 1.0)
    width, heads, head_dim = model.width, model.heads, model.head_dim
    mixture = model.mixture_layers / model.layers
    # Inputs of two norms and two products; dropout masks of programs without fused attention.
    stream = 8 * width + np.where(plan.flash, 0.0, 2 * width)
    latent = 2 * (model.q_rank + model.kv_rank)
    key_value = np.where(model.is_latent, 4 * heads * (head_dim + model.rope_dim), 4 * model.kv_heads * head_dim)
    ffn = 2 * np.asarray(model.ffn_matrices)  # gate, up and product, or input and output of the activation
    experts = model.top_k * (2 * width + ffn * model.expert_ffn) + model.shared_experts * ffn * model.expert_ffn
    inner = 4 * heads * head_dim + key_value + (1 - mixture) * (ffn * model.ffn) + mixture * experts
    scores = np.where(plan.flash, 4 * heads, 5 * heads * plan.sequence)
    selective = np.where(plan.flash, scores, 0.0)
    lean = tokens * (stream / split + latent + (inner + selective) / plan.tp)
    # One kernel per operation keeps float32 copies of the norms' inputs, and the activation's own output.
    extra = np.where(plan.eager, tokens * (12 * width / split + (1 - mixture) * 2 * model.ffn / plan.tp), 0.0)
    whole = lean + tokens * (scores - selective) / plan.tp + extra
    boundary = tokens * 2 * width / split
    policy = np.asarray(plan.recompute)
    kept = np.where(policy == NONE, whole, lean + extra)
    # Every other layer or matrix product: what is between the products is recomputed in any case.
    kept = np.where(policy == FULL, boundary, np.where(policy == HALF, (boundary + lean) / 2, kept))
    return whole, kept
