"""Seconds of one layer of one micro-batch on one rank: forward, backward and recomputation.

    layer = matrix products + attention + element-wise work + exposed TP, CP and EP communication + host wait

Passes over a layer: forward 1, backward 2 (fused attention 2.5), recomputation 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.placement.cut_load import PlacedRanks
from lakh.planner.stacked import Array
from lakh.planner.timing.attention import attention_s
from lakh.planner.timing.collectives import Fabric, all_gather_s, all_reduce_s, all_to_all_s, dispatch_s
from lakh.planner.timing.efficiency import Efficiency, exposed_s
from lakh.planner.timing.elementwise import elementwise_traffic
from lakh.planner.timing.expert_exchange import dispatched_bytes
from lakh.planner.timing.gemm import gemm_s
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["LayerTime", "MicroBatch", "launch_s", "layer_time"]

REPEATED = (0.0, 0.0, 1.0, 0.5)  # share of the forward pass that is run again: none, selective, full, half
ROUTING_KERNELS = 2.0  # host work of routing, permuting and exchanging, in units of a dense layer
# Programs before fused attention launch two dozen kernels per layer instead of one dozen, and save and restore random
# generator states around each dropout. With this value the host time fitted to A100 is that of H100 (295 us both), and
# a source without rows that the host slows down can leave it at their common prior.
UNFUSED_LAUNCHES = 2.7
GRAPH_LAUNCH = 0.2  # host work of a layer whose kernels are replayed from a CUDA graph
EXPERT_KERNELS = 0.5  # host work of each local expert's matrix products
EXPERT_BIAS_KERNELS = 0.25  # and of its bias: nine kernels in three passes, a dense layer has 36
HOST_SHARPNESS = 6.0  # 1 would add host and GPU time, infinity would take the larger: kernels of a layer differ


class MicroBatch:
    """What all terms share: the inputs, and sizes of one micro-batch on one rank."""

    def __init__(
        self,
        model: Model,
        plan: ExecutionPlan,
        cluster: Cluster,
        efficiency: Efficiency,
        placed: PlacedRanks | None = None,
    ) -> None:
        self.model, self.plan, self.gpu, self.efficiency = model, plan, cluster.gpu, efficiency
        self.fabric = Fabric(cluster, efficiency, plan.gpus, placed)
        self.tp, self.cp = np.asarray(plan.tp, dtype=float), np.asarray(plan.cp, dtype=float)
        self.tokens = plan.micro_batch * plan.sequence / self.cp
        self.stream_bytes = self.tokens * model.width * 2.0  # of the residual stream
        self.mixture_share: Array = model.mixture_layers / model.layers  # layers with experts
        self.has_experts = bool(np.any(self.mixture_share))
        # The part of the forward pass that the backward pass runs again.
        self.repeated = np.asarray(REPEATED, dtype=float)[np.asarray(plan.recompute, dtype=int)]
        self.trained = np.where(plan.adapters, 0.0, 1.0)  # 0 where weights are frozen and need no gradient product
        self.speed = 1 + plan.low_precision * efficiency.low_precision  # peak of the linear layers relative to bf16
        self.memory_Bps = self.gpu.memory_Bps * efficiency.memory
        data_ranks = plan.data_ranks
        self.count = plan.batch / (data_ranks * plan.micro_batch)  # micro-batches of each pipeline in one step
        self.stage_layers = np.ceil(model.layers / plan.pp)  # of the fullest stage
        self.data_ranks = data_ranks * self.cp  # context ranks hold shards and gradients too
        self.data_stride = plan.gradient_stride  # distance in ranks between neighbours of these

    def gemm_s(self, m: Array, k: Array, n: Array) -> Array:
        return gemm_s(m, k, n, self.gpu, self.efficiency, self.speed)


@dataclass(frozen=True)
class LayerTime:
    compute_s: Array
    """Matrix products and attention."""
    elementwise_s: Array
    host_s: Array
    """GPU waiting for kernel launches."""
    tensor_s: Array
    context_s: Array
    expert_s: Array

    @property
    def total_s(self) -> Array:
        return self.compute_s + self.elementwise_s + self.tensor_s + self.context_s + self.expert_s + self.host_s


def layer_time(mb: MicroBatch) -> LayerTime:
    plan = mb.plan
    selective = (np.asarray(plan.recompute) == 1).astype(float)
    products = (_attention_products_s(mb) + _feed_forward_products_s(mb)) * (2 + mb.trained + mb.repeated)
    scores = attention_s(mb.model, plan, mb.gpu, mb.efficiency, mb.tokens)
    scores = scores * (np.where(plan.flash, 3.5, 3.0) + mb.repeated + selective)
    passes = 3 + mb.repeated  # of element-wise work and of the host
    moved_bytes, recomputed_bytes = elementwise_traffic(mb.model, plan, mb.tokens)
    compute = products + scores + _latent_recompute_s(mb)
    elementwise = (moved_bytes * passes + recomputed_bytes * (1 - mb.repeated)) / mb.memory_Bps
    tensor = tensor_parallel_s(mb, products)
    context = context_parallel_s(mb, scores)
    expert = expert_parallel_s(mb, compute + elementwise)
    busy = compute + elementwise + tensor + context + expert
    return LayerTime(compute, elementwise, _host_wait_s(mb, passes, busy), tensor, context, expert)


# --- matrix products, forward ---


def _attention_products_s(mb: MicroBatch) -> Array:
    """Query, key and value projections in one product, and the output projection."""
    model = mb.model
    heads = model.heads * model.head_dim
    latent_columns = model.attention_weights / model.width - heads
    columns = np.where(model.is_latent, latent_columns, heads + 2 * model.kv_heads * model.head_dim)
    return mb.gemm_s(mb.tokens, model.width, columns / mb.tp) + mb.gemm_s(mb.tokens, heads / mb.tp, model.width)


def _feed_forward_products_s(mb: MicroBatch) -> Array:
    """Dense feed-forward, averaged with the experts' over the layers of a mixture model."""
    model, tp = mb.model, mb.tp
    up = np.asarray(model.ffn_matrices) - 1
    dense = mb.gemm_s(mb.tokens, model.width, up * model.ffn / tp) + mb.gemm_s(mb.tokens, model.ffn / tp, model.width)
    if not mb.has_experts:
        return dense
    split = np.where(mb.plan.whole_experts, 1.0, tp)  # ranks that share one expert
    local = _local_experts(mb)
    rows = mb.tokens * model.top_k * split / tp / local  # per expert, after an even exchange
    ffn = np.maximum(model.expert_ffn, 1.0)
    expert = mb.gemm_s(rows, model.width, up * ffn / split) + mb.gemm_s(rows, ffn / split, model.width)
    shared = mb.gemm_s(mb.tokens, model.width, up * ffn * np.maximum(model.shared_experts, 1) / tp) * 1.5
    shared = np.where(np.asarray(model.shared_experts) > 0, shared, 0.0)
    return (1 - mb.mixture_share) * dense + mb.mixture_share * (local * expert + shared)


def _local_experts(mb: MicroBatch) -> Array:
    return np.maximum(mb.model.num_experts / mb.plan.ep, 1.0)


def _latent_recompute_s(mb: MicroBatch) -> Array:
    """Up-projections of latent attention that the backward pass repeats."""
    model, plan = mb.model, mb.plan
    if not np.any(plan.recompute_latent):
        return 0.0
    queries = model.heads * (model.head_dim + model.rope_dim)
    again = mb.gemm_s(mb.tokens, np.maximum(model.q_rank, 1.0), queries / mb.tp)
    again = again + mb.gemm_s(mb.tokens, np.maximum(model.kv_rank, 1.0), 2 * model.heads * model.head_dim / mb.tp)
    return np.where(model.is_latent, plan.recompute_latent, 0.0) * (1 - mb.repeated) * again


# --- communication inside the layer ---


def tensor_parallel_s(mb: MicroBatch, products_s: Array) -> Array:
    """Two collectives of the residual stream per pass: all-reduce, or reduce-scatter and all-gather with sequence
    parallelism, which also gathers an input again in the backward pass. May overlap with the matrix products."""
    plan = mb.plan
    group = mb.fabric.group(mb.tp, plan.tensor_stride)
    gather = all_gather_s(group, mb.stream_bytes)
    one_pass = np.where(plan.sequence_parallel, 4 * gather, 2 * all_reduce_s(group, mb.stream_bytes))
    total = one_pass * (2 + mb.repeated) + np.where(plan.sequence_parallel, gather, 0.0)
    return np.where(plan.tensor_overlap, exposed_s(total, products_s, mb.efficiency), total)


def context_parallel_s(mb: MicroBatch, scores_s: Array) -> Array:
    """Keys and values travel round a ring of cp - 1 steps, overlapped with attention, or are gathered before it."""
    model, cp = mb.model, mb.cp
    width = np.where(model.is_latent, model.kv_rank + model.rope_dim, 2 * model.kv_heads * model.head_dim / mb.tp)
    gather = all_gather_s(mb.fabric.group(cp, mb.plan.context_stride), mb.tokens * cp * width * 2.0)
    ring = gather + np.maximum(cp - 2, 0) * mb.fabric.launch_s
    overlapped = exposed_s(ring * (3 + mb.repeated), scores_s * (cp - 1) / cp, mb.efficiency)
    return np.where(cp > 1, np.where(mb.plan.context_overlap, overlapped, gather * (3 + mb.repeated)), 0.0)


def expert_parallel_s(mb: MicroBatch, busy_s: Array) -> Array:
    """Two exchanges (dispatch and combine) per pass of a mixture layer. May overlap with all work of another
    micro-batch, `busy_s` seconds of a layer: then the slower of the two sets the pace, and work is slowed down while
    both run."""
    if not mb.has_experts:
        return 0.0 * mb.tokens
    model, plan = mb.model, mb.plan
    group = mb.fabric.group(plan.ep, plan.expert_stride)
    token_bytes = dispatched_bytes(plan, mb.stream_bytes)
    by_expert = all_to_all_s(group, token_bytes * model.top_k)
    by_node = dispatch_s(group, token_bytes, model.top_k, model.most_nodes)
    total = mb.mixture_share * np.where(plan.node_dispatch, by_node, by_expert) * 2 * (2 + mb.repeated)
    exposed = np.maximum(total - busy_s, mb.efficiency.interference * np.minimum(total, busy_s))
    # The forward pass of the first micro-batch and the backward pass of the last have no other beside them.
    paired = np.where(plan.expert_overlap, np.maximum(1 - 1 / mb.count, 0.0), 0.0)
    return total + paired * (exposed - total)


# --- host ---


def launch_s(mb: MicroBatch, passes: Array) -> Array:
    """Host time of a dense layer's kernels."""
    return mb.efficiency.host_us * 1e-6 * passes * np.where(mb.plan.flash, 1.0, UNFUSED_LAUNCHES)


def _host_wait_s(mb: MicroBatch, passes: Array, busy_s: Array) -> Array:
    """Time that the GPU waits for kernel launches: none while it is busy, all of it when kernels are tiny.

    A graph of the attention and router kernels is one launch; the experts' sizes are known only to the host, unless the
    full step is one graph. Narrow types double an expert's kernels.
    """
    plan, share = mb.plan, mb.mixture_share
    graphs = np.asarray(plan.cuda_graphs)
    casts = np.where(np.asarray(plan.low_precision) > 0, 2.0, 1.0)
    per_expert = EXPERT_KERNELS * casts + EXPERT_BIAS_KERNELS * np.asarray(mb.model.expert_bias)
    kernels = np.where(graphs > 0, GRAPH_LAUNCH, 1 + share * ROUTING_KERNELS)
    kernels = kernels + np.where(graphs > 1, 0.0, share * per_expert * _local_experts(mb))
    host_s = launch_s(mb, passes) * kernels
    return (host_s**HOST_SHARPNESS + busy_s**HOST_SHARPNESS) ** (1 / HOST_SHARPNESS) - busy_s
