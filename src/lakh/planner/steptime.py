"""Seconds of one optimizer step, term by term, for one layout or a million.

    step = micro-batches x slowest stage + fill and drain of the pipeline + exposed data traffic + optimizer + fixed

A stage is its layers, each the sum of matrix products (efficiency by shape), attention, memory-bound element-wise
work, host overhead that the GPU waits for, and collectives of tensor, context and expert parallelism. Recomputation
repeats the forward pass. Traffic that may overlap costs what sticks out plus a share of what is hidden, because
concurrent kernels slow each other down. Every rate is a peak times a calibrated fraction: `Fractions`, at most twelve.

Knows nothing of memory limits or money. Not modelled: stragglers, congestion of unlucky routes, uneven stages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lakh.planner.collectives import (
    Network,
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    gather_s,
    group,
    point_to_point_s,
)
from lakh.planner.elementwise import elementwise
from lakh.planner.hardware import Hardware
from lakh.planner.layout import Layout
from lakh.planner.memory import expert_copies, stage_experts, stage_parameters
from lakh.planner.shape import Array, Shape

__all__ = ["Fractions", "Step", "step_time"]

TILE_ROWS, TILE_COLUMNS = 128.0, 128.0  # the smallest that a part's processors share a product by
WIDE = 4.0  # products of so many of the part's usual tiles and more are cut into those, and the last one is padded


@dataclass(frozen=True, kw_only=True)
class Fractions:
    """How much of each peak a program gets on one GPU type. Calibrated, with bounds and priors in calibration.py."""

    gemm: Array = 0.78
    """Of the dense peak, for a large matrix product."""
    gemm_knee: Array = 150.0
    """Inner size at which a product reaches half of that."""
    wave: Array = 0.5
    """How much a last, partly filled wave of tiles costs: 0 nothing, 1 a whole wave."""
    attention: Array = 0.45
    """Of the dense peak, for FlashAttention-2 with heads of USUAL_HEAD."""
    memory: Array = 0.75
    """Of the memory bandwidth, for element-wise work."""
    host_us: Array = 100.0
    """Host time of one layer's forward pass that the GPU waits for."""
    collective_us: Array = 30.0
    """Launch and synchronisation of one collective inside the model."""
    node: Array = 0.75
    """Of the node's links."""
    nic: Array = 0.75
    """Of the network between nodes."""
    interference: Array = 0.2
    """Seconds lost per second of traffic hidden behind computation."""
    low_precision: Array = 0.6
    """Of the extra peak of fp8 and narrower types."""
    fixed_ms: Array = 10.0
    """Once per step: data, logging, clipping, launch of the optimizer."""


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step go; the parts add up to `total_s`."""

    compute_s: Array
    """Matrix products and attention of all micro-batches of the slowest stage."""
    elementwise_s: Array
    host_s: Array
    tensor_s: Array
    context_s: Array
    expert_s: Array
    pipeline_s: Array
    """Transfers between stages."""
    bubble_s: Array
    data_s: Array
    """Exposed gradient and parameter traffic."""
    optimizer_s: Array
    fixed_s: Array

    @property
    def total_s(self) -> Array:
        return sum(getattr(self, f.name) for f in fields(self))


def gemm_s(m: Array, k: Array, n: Array, hw: Hardware, fr: Fractions, speed: Array) -> Array:
    """One matrix product of (m, k) by (k, n): the slower of arithmetic and memory."""
    tiles = np.ceil(m / TILE_ROWS) * np.ceil(n / TILE_COLUMNS)
    padded = np.where(n >= WIDE * hw.tile_columns, np.ceil(n / hw.tile_columns) * hw.tile_columns, n)
    waves = np.maximum(tiles, 1.0) / hw.processors
    filled = waves / (waves + fr.wave * (np.ceil(waves) - waves))
    efficiency = fr.gemm * filled * k / (k + fr.gemm_knee)
    arithmetic = 2 * m * k * padded / (hw.arithmetic_FLOPs * speed * efficiency)
    traffic = 2 * (m * k + k * n + m * n) / (hw.memory_Bps * fr.memory)
    return np.maximum(arithmetic, traffic)


def step_time(shape: Shape, layout: Layout, hw: Hardware, fr: Fractions) -> Step:
    net = Network(hw, fr.node, fr.nic, fr.collective_us * 1e-6)
    memory_Bps = hw.memory_Bps * fr.memory
    lo, sh = layout, shape
    tp, cp = np.asarray(lo.tp, dtype=float), np.asarray(lo.cp, dtype=float)
    tokens = lo.micro_batch * lo.sequence / cp
    split = np.where(lo.sequence_parallel, tp, 1.0)  # what norms and residuals are divided by
    speed = 1 + lo.low_precision * fr.low_precision
    h, width_bytes = sh.width, 2.0
    moe_share = sh.moe_layers / sh.layers

    # --- matrix products of one layer, forward ---
    kv_columns = np.where(sh.is_mla, 0, 2 * sh.kv_heads * sh.head_dim)
    qkv_columns = np.where(
        sh.is_mla, sh.attention_weights / h - sh.heads * sh.head_dim, sh.heads * sh.head_dim + kv_columns
    )
    attention_out = sh.heads * sh.head_dim
    gemms = gemm_s(tokens, h, qkv_columns / tp, hw, fr, speed) + gemm_s(tokens, attention_out / tp, h, hw, fr, speed)
    up = 1 + np.asarray(sh.gated)
    dense = gemm_s(tokens, h, up * sh.ffn / tp, hw, fr, speed) + gemm_s(tokens, sh.ffn / tp, h, hw, fr, speed)
    if np.any(moe_share):
        cut = np.where(lo.experts_whole, 1.0, tp)  # ranks that share one expert
        routed = tokens * sh.top_k * cut / tp  # tokens that this rank's experts see, with even routing
        local = np.maximum(sh.experts / lo.ep, 1.0)
        rows = routed / local  # per expert, after the exchange
        expert_f = np.maximum(sh.expert_ffn, 1.0)
        one = gemm_s(rows, h, up * expert_f / cut, hw, fr, speed) + gemm_s(rows, expert_f / cut, h, hw, fr, speed)
        shared = np.where(
            np.asarray(sh.shared_experts) > 0,
            gemm_s(tokens, h, up * expert_f * np.maximum(sh.shared_experts, 1) / tp, hw, fr, speed) * 1.5,
            0.0,
        )
        dense = (1 - moe_share) * dense + moe_share * (local * one + shared)
        gemms = gemms + dense
    else:
        gemms = gemms + dense

    # --- attention, forward: half of the score matrix when causal and fused, all of it otherwise ---
    seen = sh.attended(lo.sequence)  # tokens that the score matrix is wide, over all layers
    score_flops = 4 * tokens * seen * sh.attention_dim / tp
    kernel = np.where(lo.native_attention, hw.attention_gain, 1.0)
    kernel = kernel * _beside_softmax(sh.head_dim, hw) / _beside_softmax(USUAL_HEAD, hw)
    fused = score_flops / 2 / (hw.arithmetic_FLOPs * fr.attention * kernel)
    scores = tokens * lo.sequence * sh.heads / tp
    unfused = score_flops / (hw.arithmetic_FLOPs * fr.gemm * sh.head_dim / (sh.head_dim + fr.gemm_knee))
    unfused = unfused + scores * UNFUSED_SCORE_BYTES / memory_Bps
    piece = lo.sequence / (2 * cp)  # a ring of cp ranks works on two pieces each, and short pieces fill a GPU badly
    fused = fused * np.where(cp > 1, 1 + ATTENTION_KNEE / piece, 1.0)
    attention = np.where(lo.flash, fused, unfused)

    moved = elementwise(sh, lo, tokens)

    # --- passes over a layer: forward 1, backward 2 (attention 2.5 when fused), recomputation 0 to 1 ---
    full = np.asarray(REPEATED, dtype=float)[np.asarray(lo.recompute, dtype=int)]
    selective = (np.asarray(lo.recompute) == 1).astype(float)
    trained = np.where(lo.adapters, 0.0, 1.0)  # frozen weights need no product for their gradient
    gemm_passes = 2 + trained + full
    attention_passes = np.where(lo.flash, 3.5, 3.0) + full + selective
    passes = 3 + full  # of element-wise work and of the host

    # --- tensor parallelism: two collectives of the residual stream per pass ---
    tp_group = group(net, tp, 1.0)
    stream = tokens * h * width_bytes
    reduce_pass = 2 * all_reduce_s(net, tp_group, stream)
    sharded_pass = 4 * gather_s(net, tp_group, stream)
    tensor_pass = np.where(lo.sequence_parallel, sharded_pass, reduce_pass)
    # With sequence parallelism the backward pass gathers its two inputs again.
    tensor_layer = tensor_pass * (2 + full) + np.where(lo.sequence_parallel, gather_s(net, tp_group, stream), 0.0)
    tensor_layer = np.where(lo.tensor_overlap, _exposed(tensor_layer, gemms * gemm_passes, fr), tensor_layer)

    # --- context parallelism: keys and values go round; what attention does not hide sticks out ---
    cp_group = group(net, cp, tp)
    kv_width = np.where(sh.is_mla, sh.kv_rank + sh.rope_dim, 2 * sh.kv_heads * sh.head_dim / tp)
    kv_bytes = tokens * cp * kv_width * width_bytes
    ring_s = gather_s(net, cp_group, kv_bytes) + np.maximum(cp - 2, 0) * net.launch_s  # cp - 1 steps, each a launch
    context_comm = ring_s * (3 + full)
    context_layer = np.where(cp > 1, _exposed(context_comm, attention * attention_passes * (cp - 1) / cp, fr), 0.0)

    # --- expert parallelism: two exchanges per pass of a mixture layer ---
    expert_layer: Array = 0.0 * tokens
    if np.any(moe_share):
        ep_group = group(net, lo.ep, np.where(lo.experts_whole, 1.0, tp * cp))
        token_bytes = stream / split
        by_expert = all_to_all_s(net, ep_group, token_bytes * sh.top_k)
        by_node = dispatch_s(net, ep_group, token_bytes, sh.top_k, sh.routed_nodes)
        expert_comm = moe_share * np.where(lo.node_dispatch, by_node, by_expert) * 2 * (2 + full)
        behind = gemms * gemm_passes + attention * attention_passes
        has_other_work = np.asarray(lo.expert_overlap, dtype=bool) & (lo.micro_batches >= 2)
        expert_layer = np.where(has_other_work, _exposed(expert_comm, behind, fr), expert_comm)

    # --- one micro-batch on one stage ---
    stage_layers = np.ceil(sh.layers / lo.pp)  # of the fullest stage
    compute_layer = gemms * gemm_passes + attention * attention_passes
    if np.any(lo.repeats_latent):
        queries = sh.heads * (sh.head_dim + sh.rope_dim)
        again = gemm_s(tokens, np.maximum(sh.q_rank, 1.0), queries / tp, hw, fr, speed)
        again = again + gemm_s(tokens, np.maximum(sh.kv_rank, 1.0), 2 * sh.heads * sh.head_dim / tp, hw, fr, speed)
        compute_layer = compute_layer + np.where(sh.is_mla, lo.repeats_latent, 0.0) * (1 - full) * again
    elementwise_layer = (moved.forward_bytes * passes + moved.again_bytes * (1 - full)) / memory_Bps
    local_experts = np.maximum(sh.experts / lo.ep, 1.0)
    casts = np.where(np.asarray(lo.low_precision) > 0, 2.0, 1.0)  # narrow types double an expert's kernels
    # A graph of the attention and router kernels is one launch; the experts' sizes are known to the host alone, unless
    # the whole step is one graph.
    graphed = np.asarray(lo.graphed)
    launches = np.where(lo.flash, 1.0, UNFUSED_LAUNCHES)
    kernels = np.where(graphed > 0, GRAPH_LAUNCH, 1 + moe_share * ROUTING_KERNELS)
    per_expert = EXPERT_KERNELS * casts + EXPERT_BIAS_KERNELS * np.asarray(sh.expert_bias)
    kernels = kernels + np.where(graphed > 1, 0.0, moe_share * per_expert * local_experts)
    working = compute_layer + elementwise_layer + tensor_layer + context_layer + expert_layer
    host_layer = _waited_for(fr.host_us * 1e-6 * passes * launches * kernels, working)
    layer_s = working + host_layer  # what data traffic may hide behind, whoever is busy meanwhile
    head = (2 + trained) * gemm_s(tokens, h, sh.vocab / tp, hw, fr, 1.0)
    head_memory = tokens * sh.vocab / tp * HEAD_BYTES / memory_Bps

    # --- sharded parameters (FSDP): gathered for forward and backward, gradients scattered, per micro-batch ---
    # Experts are shared only by ranks that hold the same ones, which lie further apart than other data ranks.
    shard_group = group(net, lo.shard, lo.data_stride / cp)  # context ranks hold shards too
    params = stage_parameters(sh, lo)
    experts = stage_experts(sh, lo)
    dense_params = params - experts
    copies = expert_copies(lo)
    expert_stride = np.asarray(lo.ep, dtype=float) * np.where(lo.experts_whole, 1.0, tp * cp)
    gradient_bytes = lo.gradient_bytes * trained
    fsdp_comm = 2 * gather_s(net, shard_group, dense_params / stage_layers * 2)
    fsdp_comm = fsdp_comm + gather_s(net, shard_group, dense_params / stage_layers * gradient_bytes)
    if np.any(moe_share):
        expert_shards = group(net, np.minimum(lo.shard, copies), expert_stride)
        of_experts = gather_s(net, expert_shards, experts / stage_layers * (4 + gradient_bytes))
        fsdp_comm = fsdp_comm + np.where(experts > 0, of_experts, 0.0)
    # A pipeline keeps the gathered weights of its stage for the whole step; without one each micro-batch gathers anew.
    gathers = np.where(np.asarray(lo.pp) > 1, 1.0, lo.micro_batches)
    fsdp_layer = np.where(
        np.asarray(lo.shard) > 1, np.where(lo.overlap, _exposed(fsdp_comm, layer_s, fr), fsdp_comm), 0.0
    )

    # --- pipeline ---
    count = lo.micro_batches
    pieces = tp  # every tensor rank sends its part, the neighbour gathers it inside the node
    hop = point_to_point_s(net, stream / pieces, lo.stage_stride)
    transfers = np.where(np.asarray(lo.pp) > 1, 2 * hop * lo.chunks, 0.0)
    # Only a stage that runs two chunks ahead has work while its results travel; others wait for them in lockstep.
    is_ahead = (np.asarray(lo.chunks) > 1) & (np.asarray(lo.run_ahead) >= 2)
    hidden = np.where(np.asarray(lo.overlap, dtype=bool) & is_ahead, fr.interference, 1.0)
    # The last stage has the logits and one neighbour, the others two: whichever is slower sets the pace.
    spared = np.where(np.asarray(lo.pp) > 1, np.minimum(hop * hidden, head + head_memory), 0.0)
    pipeline = count * (transfers * hidden - spared)
    stage_s = stage_layers * layer_s + transfers
    idle = (np.asarray(lo.pp) - 1) / lo.chunks * np.where(lo.zero_bubble, 1 / 3, 1.0)
    bubble = idle * stage_s

    # --- gradients across data ranks, once per step ---
    data = lo.data_ranks * cp
    dp_group = group(net, data, lo.data_stride / cp)
    replicas = group(net, np.maximum(data / np.maximum(lo.shard, 1), 1.0), lo.data_stride / cp * lo.shard)
    dense_gradient = dense_params * gradient_bytes
    plain = all_reduce_s(net, dp_group, dense_gradient)
    scatter = gather_s(net, dp_group, dense_gradient)
    zero = scatter + gather_s(net, dp_group, dense_params * 2 * trained)
    across = all_reduce_s(net, replicas, dense_gradient / lo.shard)
    if np.any(moe_share):
        expert_group, expert_gradient = group(net, copies, expert_stride), experts * gradient_bytes
        plain = plain + np.where(experts > 0, all_reduce_s(net, expert_group, expert_gradient), 0.0)
        expert_scatter = np.where(experts > 0, gather_s(net, expert_group, expert_gradient), 0.0)
        zero = zero + expert_scatter + np.where(experts > 0, gather_s(net, expert_group, experts * 2 * trained), 0.0)
        scatter = scatter + expert_scatter
    # ZeRO-2 scatters a chunk's gradients after each round of micro-batches (each micro-batch without a pipeline).
    rounds = np.where(np.asarray(lo.pp) > 1, np.maximum(np.floor(count / lo.pp), 1.0), count)
    rounds = np.where(lo.zero2, rounds, 1.0)
    zero = zero + (rounds - 1) * scatter
    gradient = np.where(np.asarray(lo.shard) > 1, across, np.where(lo.zero1, zero, plain))
    # Behind the backward pass of the last micro-batch (and the forward pass of the first), less what shards took of it.
    taken = np.where(np.asarray(lo.shard) > 1, stage_layers * np.minimum(fsdp_comm, layer_s), 0.0)
    window = stage_layers * layer_s * np.where(lo.zero1, 1.0, 0.6)
    window = window + (rounds - 1) * 0.6 * stage_layers * layer_s * count / rounds  # each round has its own backward
    window = np.maximum(window - taken, 0.0)
    data_s = np.where(lo.overlap, _exposed(gradient, window, fr), gradient)
    data_s = data_s + gathers * stage_layers * fsdp_layer

    # --- optimizer: read gradient, master and moments, write master, moments and weight ---
    owners = np.where(np.asarray(lo.shard) > 1, lo.shard, np.where(lo.zero1, data, 1.0))
    owned = (dense_params / owners + experts / np.minimum(owners, copies)) * trained
    optimizer = owned * OPTIMIZER_BYTES / memory_Bps
    optimizer = optimizer + np.where(lo.offload, owned * 16 / hw.host_Bps, 0.0)

    repeat = count * stage_layers
    return Step(
        compute_s=repeat * compute_layer + count * head,
        elementwise_s=repeat * elementwise_layer + count * head_memory,
        host_s=repeat * host_layer,
        tensor_s=repeat * tensor_layer,
        context_s=repeat * context_layer,
        expert_s=repeat * expert_layer,
        pipeline_s=pipeline,
        bubble_s=bubble,
        data_s=data_s,
        optimizer_s=optimizer,
        fixed_s=fr.fixed_ms * 1e-3 + np.zeros(np.shape(count)),
    )


USUAL_HEAD = 128.0
ATTENTION_KNEE = 256.0  # tokens of a piece at which fused attention reaches half of its speed
ROUTING_KERNELS = 2.0  # host work of routing, permuting and exchanging, in units of a dense layer
# Programs before fused attention: two dozen kernels a layer instead of one dozen, and states of random generators saved
# and put back around each dropout. The value is what makes A100's host time that of newer programs on newer machines.
UNFUSED_LAUNCHES = 3.0
GRAPH_LAUNCH = 0.2  # and of a layer whose kernels are recorded and replayed
EXPERT_KERNELS = 0.5  # and of each expert that a rank holds: its products
EXPERT_BIAS_KERNELS = 0.25  # and its bias, added expert by expert: nine kernels in three passes, a dense layer has 36
REPEATED = (0.0, 0.0, 1.0, 0.5)  # share of the forward pass that is run again: none, selective, full, half

UNFUSED_SCORE_BYTES = 13.0  # write scores; softmax read and write; dropout read, write and mask; read for the values
HEAD_BYTES = 20.0  # logits in bf16, their float32 copy, softmax, its gradient
OPTIMIZER_BYTES = 34.0  # gradient 2 read twice (norm, update), master and two moments read and written, weight written


def _beside_softmax(head_dim: Array, hw: Hardware) -> Array:
    """Share of fused attention's time that is matrix products: small heads have more exponentials per FLOP."""
    return head_dim / (head_dim + hw.softmax_knee)


HOST_SHARPNESS = 6.0  # 1 would add host and GPU time, infinity would take the larger: kernels of a layer differ


def _waited_for(host: Array, busy: Array) -> Array:
    """What the GPU waits for its host: nothing while it is busy, everything when its kernels are tiny."""
    return (host**HOST_SHARPNESS + busy**HOST_SHARPNESS) ** (1 / HOST_SHARPNESS) - busy


def _exposed(comm: Array, busy: Array, fr: Fractions) -> Array:
    """Traffic that computation cannot hide, plus what hiding the rest costs."""
    return np.maximum(comm - busy, 0.0) + fr.interference * np.minimum(comm, busy)
