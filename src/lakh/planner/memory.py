"""Bytes on one GPU: states, gathered layers, activations in flight, logits, and what the allocator wastes.

Counted per stage of the pipeline: the first holds the most micro-batches in flight, the last holds the logits; the
fullest one counts. Where the layers do not divide, the first and the last stage are the lighter ones, as they have the
tables (Llama 3 does so, arXiv 2407.21783, section 3.3.2); the second may then be the fullest. Activations follow the
tensors that a block's backward pass needs (arXiv 2205.05198 for the plain block), generalised to grouped queries,
gated feed-forward, experts and latent attention. Like everything here it takes one layout or a million. Knows no time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lakh.planner.layout import FULL, HALF, NONE, Layout
from lakh.planner.shape import Array, Shape

__all__ = ["OPTIMIZER_BYTES", "Memory", "expert_copies", "in_flight", "memory", "stage_experts", "stage_parameters"]

# Bytes of optimizer state per parameter, master copy included where there is one.
OPTIMIZER_BYTES = {"adamw": 12.0, "adamw-8bit": 6.0, "adamw-bf16": 4.0, "muon": 8.0, "sgd": 8.0}

CONTEXT_BYTES = 2.0 * 2**30  # CUDA context, communicator buffers, workspaces of matrix products
# What a caching allocator cannot hand out again: a share of activations and temporary buffers. The micro-batches of a
# pipeline all ask for the same sizes, so that each takes over the blocks of an earlier one and only one counts; not so
# where each operation is its own kernel, whose temporaries lie between the blocks that stay.
FRAGMENTATION = 0.08
LOGIT_BYTES = 10.0  # bf16 logits, their float32 copy and its gradient


@dataclass(frozen=True)
class Memory:
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


def stage_parameters(shape: Shape, layout: Layout) -> Array:
    """Parameters of one pipeline stage on one tensor rank, before any sharding over data ranks."""
    blocks = shape.parameters - shape.table_weights - _all_experts(shape)
    most = np.ceil(shape.layers / layout.pp)
    fullest = blocks / (layout.tp * shape.layers / most) + stage_experts(shape, layout)
    tables = np.where(np.asarray(layout.pp) > 1, 1.0, 2 - np.asarray(shape.tied)) * shape.vocab * shape.width
    with_table = fullest * (1 - _is_uneven(shape, layout) / most) + tables / layout.tp
    return np.maximum(fullest, with_table)


def _is_uneven(shape: Shape, layout: Layout) -> Array:
    """1 where the layers do not divide over the stages: the stages with a table then have a layer less."""
    return (np.asarray(shape.layers) % layout.pp > 0) * 1.0


def in_flight(layout: Layout, stage: Array) -> Array:
    """Micro-batches whose activations a stage (0 is the first) holds at most: its warm-up and the one at work.

    GPipe: all. 1F1B: the stages still to come. Interleaved: each chunk but the last of a whole round, and `run_ahead`
    chunks per stage still to come (Megatron-LM's and torch's schedules: 2). Exchanges of experts behind computation
    need a second micro-batch to compute on, which a pipeline has anyway.
    """
    pp, count = np.asarray(layout.pp, dtype=float), np.maximum(layout.micro_batches, 1.0)
    chunks = np.maximum(np.asarray(layout.chunks, dtype=float), 1.0)
    ahead = np.where(chunks > 1, layout.run_ahead, 1.0)
    held = (chunks - 1) * np.minimum(pp, count) + ahead * np.maximum(pp - 1 - stage, 0.0) + 1
    held = held + np.where(np.asarray(layout.expert_overlap, dtype=bool) & (pp == 1), 1.0, 0.0)
    return np.where(layout.gpipe, count, np.minimum(held / chunks, count))


def stage_experts(shape: Shape, layout: Layout) -> Array:
    """Of these, the parameters of routed experts."""
    share = shape.layers / np.ceil(shape.layers / layout.pp)
    return _all_experts(shape) / (share * layout.ep * np.where(layout.experts_whole, 1.0, layout.tp))


def expert_copies(layout: Layout) -> Array:
    """Ranks that hold the same experts: they share their gradients and states."""
    return np.maximum(layout.gpus / (layout.pp * layout.ep * np.where(layout.experts_whole, 1.0, layout.tp)), 1.0)


def _all_experts(shape: Shape) -> Array:
    return shape.moe_layers * shape.experts * shape.expert_weights


def memory(shape: Shape, layout: Layout) -> Memory:
    lo, sh = layout, shape
    params = stage_parameters(sh, lo)
    shard = np.maximum(np.asarray(lo.shard, dtype=float), 1.0)
    is_sharded, is_pipelined = shard > 1, np.asarray(lo.pp) > 1
    data = lo.data_ranks * lo.cp
    owners = np.where(is_sharded, shard, np.where(lo.zero1, data, 1.0))
    stage_layers = np.ceil(sh.layers / lo.pp)

    # A pipeline with sharded data ranks keeps the gathered weights and whole gradients of its stage through the step.
    # Experts are cut up only over the ranks that hold the same ones: what is spread by ep has few copies left to share.
    experts = stage_experts(sh, lo)
    dense = params - experts
    copies = expert_copies(lo)
    expert_shard, expert_owners = np.minimum(shard, copies), np.minimum(owners, copies)
    held_parameters = dense / shard + experts / expert_shard
    weights = held_parameters * lo.weight_bytes
    layer = params / stage_layers * 2.0
    gathered = np.where(is_sharded, np.where(is_pipelined, params * 2.0, 2 * layer), 0.0)
    chunks = np.maximum(np.asarray(lo.chunks, dtype=float), 1.0)
    whole = np.where(is_pipelined, params, held_parameters)
    at_work = params * np.minimum(2 / np.where(is_pipelined, chunks, stage_layers), 1.0)
    cut_up = np.minimum(dense / owners + experts / expert_owners + at_work, whole)
    trained = np.where(lo.adapters, 0.0, 1.0)
    gradients = np.where(lo.zero2, cut_up, whole) * lo.gradient_bytes * trained
    optimizer = trained * np.where(lo.offload, 0.0, (dense / owners + experts / expert_owners) * lo.optimizer_bytes)

    per_layer, kept = _activation_bytes(sh, lo)
    uneven = _is_uneven(sh, lo)
    held = stage_layers * kept
    held_by_ends = (stage_layers - uneven) * kept  # the first and the last stage
    working = np.where(np.asarray(lo.recompute) == NONE, 0.0, per_layer)
    tokens = lo.micro_batch * lo.sequence / lo.cp
    logits = tokens * sh.vocab / lo.tp * LOGIT_BYTES
    most_held = np.maximum(held_by_ends * in_flight(lo, 0.0), held * in_flight(lo, 1.0) * uneven)
    early = most_held + working
    last = held_by_ends * in_flight(lo, np.asarray(lo.pp) - 1) + working
    is_early = is_pipelined & (early > last + logits)
    logits_here = np.where(is_early, 0.0, logits)
    activations = np.where(is_early, early, last)
    return Memory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        gathered_bytes=gathered,
        activations_bytes=activations,
        logits_bytes=logits_here,
        fragmentation_bytes=FRAGMENTATION * (np.where(lo.eager, activations, held + working) + logits_here + gathered),
        context_bytes=CONTEXT_BYTES + np.zeros(np.shape(activations)),
    )


def _activation_bytes(sh: Shape, lo: Layout) -> tuple[Array, Array]:
    """Bytes that one layer makes for one micro-batch, and what of it is kept until the backward pass."""
    tokens = lo.micro_batch * lo.sequence / lo.cp
    split = np.where(lo.sequence_parallel, lo.tp, 1.0)
    h, a, d = sh.width, sh.heads, sh.head_dim
    moe = sh.moe_layers / sh.layers
    stream = 8 * h + np.where(lo.flash, 0.0, 2 * h)  # two norm and two product inputs; dropout masks of older programs
    latent = np.where(sh.is_mla, 2 * (sh.q_rank + sh.kv_rank), 0.0)
    qkv = 4 * a * d + np.where(sh.is_mla, 4 * a * (d + sh.rope_dim), 4 * sh.kv_heads * d)
    ffn = 2 * (2 + np.asarray(sh.gated))  # gate, up and product, or input and output of the activation
    dense = ffn * sh.ffn
    routed = sh.top_k * (2 * h + ffn * sh.expert_ffn) + sh.shared_experts * ffn * sh.expert_ffn
    scores = np.where(lo.flash, 4 * a, 5 * a * lo.sequence)
    selective = np.where(lo.flash, scores, 0.0)
    inner = qkv + (1 - moe) * dense + moe * routed
    lean = tokens * (stream / split + latent + (inner + selective) / lo.tp)
    # One kernel per operation keeps float32 copies of the norms' inputs, and the activation's own output.
    extra = np.where(lo.eager, tokens * (12 * h / split + (1 - moe) * 2 * sh.ffn / lo.tp), 0.0)
    whole = lean + tokens * (scores - selective) / lo.tp + extra
    boundary = tokens * 2 * h / split
    code = np.asarray(lo.recompute)
    kept = np.where(code == NONE, whole, lean + extra)
    # Every other layer or matrix product: what lies between the products is computed again in any case.
    kept = np.where(code == FULL, boundary, np.where(code == HALF, (boundary + lean) / 2, kept))
    return whole, kept
