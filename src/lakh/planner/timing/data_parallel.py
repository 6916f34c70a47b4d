"""Data-parallel traffic of one step (FSDP, ZeRO, plain all-reduce) and the optimizer update.

Routed experts are held only by some ranks: they share gradients and states with the ranks that hold the same experts,
which are farther apart than other data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lakh.planner.memory import expert_copies, stage_experts, stage_parameters
from lakh.planner.stacked import Array
from lakh.planner.timing.collectives import all_gather_s, all_reduce_s
from lakh.planner.timing.efficiency import Efficiency, exposed_s
from lakh.planner.timing.layer import MicroBatch

__all__ = ["GradientTraffic", "StageWeights", "fsdp_layer_s", "gradient_sync_s", "gradient_traffic", "optimizer_s"]

# Bytes per parameter: gradient 2 read twice (norm, update), master and two moments read and written, weight written.
OPTIMIZER_TRAFFIC_BYTES = 34.0
HOST_Bps = 25e9
"""Between GPU and host memory, per GPU and direction: PCIe 4.0 x16 with its usual losses."""
BACKWARD_SHARE = 0.6  # of a layer's time: what gradient traffic can overlap with


class StageWeights:
    """Parameters of one pipeline stage on one tensor rank."""

    def __init__(self, mb: MicroBatch) -> None:
        self.experts = stage_experts(mb.model, mb.plan)
        self.dense = stage_parameters(mb.model, mb.plan) - self.experts
        self.copies = expert_copies(mb.plan)  # ranks that hold the same experts
        self.gradient_bytes = mb.plan.gradient_bytes * mb.trained  # communicated per gradient; 0 for frozen weights


def fsdp_layer_s(mb: MicroBatch, weights: StageWeights) -> Array:
    """One layer of sharded parameters: two all-gathers of bf16 weights and a reduce-scatter of the gradients."""
    plan, layers = mb.plan, mb.stage_layers
    group = mb.fabric.group(plan.shard, mb.data_stride)
    traffic = 2 * all_gather_s(group, weights.dense / layers * 2)
    traffic = traffic + all_gather_s(group, weights.dense / layers * weights.gradient_bytes)
    if mb.has_experts:
        group = mb.fabric.group(np.minimum(plan.shard, weights.copies), np.asarray(plan.ep) * plan.expert_stride)
        of_experts = all_gather_s(group, weights.experts / layers * (4 + weights.gradient_bytes))
        traffic = traffic + np.where(weights.experts > 0, of_experts, 0.0)
    return traffic


@dataclass(frozen=True)
class GradientTraffic:
    """Data-parallel traffic of a step, before overlap."""

    traffic_s: Array
    window_s: Array
    """Computation that it can overlap with."""
    layers_s: Array
    """Exposed in any case: what FSDP's layers wait for."""

    def take(self, index: Any) -> GradientTraffic:
        """Of some of an array of plans."""
        return GradientTraffic(self.traffic_s[index], self.window_s[index], self.layers_s[index])

    def exposed_s(self, overlap: Array, efficiency: Efficiency, across_s: Array = 0.0) -> Array:
        """Exposed seconds, with `across_s` more traffic, e.g. between sites."""
        traffic = self.traffic_s + across_s
        return np.where(overlap, exposed_s(traffic, self.window_s, efficiency), traffic) + self.layers_s


def gradient_sync_s(mb: MicroBatch, weights: StageWeights, layer_s: Array) -> Array:
    """Exposed data-parallel traffic of a step."""
    return gradient_traffic(mb, weights, layer_s).exposed_s(mb.plan.overlap, mb.efficiency)


def gradient_traffic(mb: MicroBatch, weights: StageWeights, layer_s: Array) -> GradientTraffic:
    """Traffic of one step, and what it can overlap with.

    Without sharding: an all-reduce, or with ZeRO a reduce-scatter of gradients and an all-gather of weights, overlapped
    with the backward pass of the last micro-batch (ZeRO: and the forward pass of the first). ZeRO-2 scatters a chunk's
    gradients after each round of micro-batches, or after each micro-batch without a pipeline. With sharding: FSDP's
    traffic per layer, and an all-reduce between replicas. A pipeline keeps the gathered weights of its stage for the
    full step; without one each micro-batch gathers again.
    """
    plan, eff, layers, count = mb.plan, mb.efficiency, mb.stage_layers, mb.count
    is_sharded, is_pipelined = np.asarray(plan.shard) > 1, np.asarray(plan.pp) > 1
    has_zero, has_zero2 = np.asarray(plan.zero) >= 1, np.asarray(plan.zero) >= 2
    fsdp = fsdp_layer_s(mb, weights)
    fsdp_exposed = np.where(is_sharded, np.where(plan.overlap, exposed_s(fsdp, layer_s, eff), fsdp), 0.0)

    all_reduce, scatter, gather = _unsharded_traffic(mb, weights)
    rounds = np.where(is_pipelined, np.maximum(np.floor(count / plan.pp), 1.0), count)
    rounds = np.where(has_zero2, rounds, 1.0)
    zero = scatter + gather + (rounds - 1) * scatter
    traffic = np.where(is_sharded, _replica_all_reduce_s(mb, weights), np.where(has_zero, zero, all_reduce))

    stage_s = layers * layer_s
    window = stage_s * np.where(has_zero, 1.0, BACKWARD_SHARE)
    window = window + (rounds - 1) * BACKWARD_SHARE * stage_s * count / rounds  # each round has its own backward pass
    used_by_fsdp = np.where(is_sharded, layers * np.minimum(fsdp, layer_s), 0.0)
    window = np.maximum(window - used_by_fsdp, 0.0)
    return GradientTraffic(traffic, window, np.where(is_pipelined, 1.0, count) * layers * fsdp_exposed)


def _unsharded_traffic(mb: MicroBatch, weights: StageWeights) -> tuple[Array, Array, Array]:
    """All-reduce of the gradients; reduce-scatter of the gradients; all-gather of the weights."""
    plan = mb.plan
    group = mb.fabric.group(mb.data_ranks, mb.data_stride)
    gradient = weights.dense * weights.gradient_bytes
    all_reduce, scatter = all_reduce_s(group, gradient), all_gather_s(group, gradient)
    gather = all_gather_s(group, weights.dense * 2 * mb.trained)
    if mb.has_experts:
        group = mb.fabric.group(weights.copies, np.asarray(plan.ep) * plan.expert_stride)
        gradient, has = weights.experts * weights.gradient_bytes, weights.experts > 0
        all_reduce = all_reduce + np.where(has, all_reduce_s(group, gradient), 0.0)
        scatter = scatter + np.where(has, all_gather_s(group, gradient), 0.0)
        gather = gather + np.where(has, all_gather_s(group, weights.experts * 2 * mb.trained), 0.0)
    return all_reduce, scatter, gather


def _replica_all_reduce_s(mb: MicroBatch, weights: StageWeights) -> Array:
    """All-reduce of a shard's gradients between replicas (HSDP)."""
    plan = mb.plan
    replicas = np.maximum(mb.data_ranks / np.maximum(plan.shard, 1), 1.0)
    group = mb.fabric.group(replicas, mb.data_stride * plan.shard)
    return all_reduce_s(group, weights.dense * weights.gradient_bytes / plan.shard)


def optimizer_s(mb: MicroBatch, weights: StageWeights) -> Array:
    """Memory traffic of the update on the rank's own part of the states, and their transfer when offloaded."""
    plan = mb.plan
    owners = np.where(np.asarray(plan.shard) > 1, plan.shard, np.where(np.asarray(plan.zero) >= 1, mb.data_ranks, 1.0))
    owned = (weights.dense / owners + weights.experts / np.minimum(owners, weights.copies)) * mb.trained
    return owned * OPTIMIZER_TRAFFIC_BYTES / mb.memory_Bps + np.where(plan.offload, owned * 16 / HOST_Bps, 0.0)
