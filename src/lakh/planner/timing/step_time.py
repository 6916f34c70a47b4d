"""Seconds of one optimizer step, for one execution plan or a million.

    step = micro-batches x (layers of the slowest stage + logits) + pipeline transfers and bubble
           + exposed data-parallel traffic + optimizer + fixed

Not modelled: stragglers, congestion of unlucky routes, uneven stages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.placement.cut_load import PlacedRanks
from lakh.planner.stacked import Array
from lakh.planner.timing.data_parallel import StageWeights, gradient_sync_s, optimizer_s
from lakh.planner.timing.efficiency import Efficiency
from lakh.planner.timing.gemm import gemm_s
from lakh.planner.timing.layer import MicroBatch, launch_s, layer_time
from lakh.planner.timing.pipeline import bubble_s, pipeline_s
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["GPU_PARTS", "StepTime", "logits_s", "step_time"]

GPU_PARTS = ("compute_s", "elementwise_s", "host_s", "bubble_s", "optimizer_s", "fixed_s")
"""Parts of a step that are not communication."""
HEAD_BYTES = 20.0  # per logit: bf16 logits, their float32 copy, softmax, its gradient
# Megatron-LM's vocab-parallel cross-entropy on a float32 copy: cast (6), maximum (4), subtract (8), exponentials (8),
# sum (4), divide (8); backward multiply (8) and cast (6).
EAGER_HEAD_BYTES = 52.0


@dataclass(frozen=True)
class StepTime:
    """Parts of a step, which add up to `total_s`."""

    compute_s: Array
    """Matrix products and attention of all micro-batches on the slowest stage."""
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


def step_time(
    model: Model,
    plan: ExecutionPlan,
    cluster: Cluster,
    efficiency: Efficiency,
    placed: PlacedRanks | None = None,
) -> StepTime:
    """`placed` are ranks of a single plan on given GPUs; without it rank r is on GPU r."""
    mb = MicroBatch(model, plan, cluster, efficiency, placed)
    layer = layer_time(mb)
    layer_s = layer.total_s
    head_s, head_memory_s, head_host_s = logits_s(mb)
    transfers, pipeline = pipeline_s(mb, head_s + head_memory_s + head_host_s)
    weights = StageWeights(mb)
    count, repeat = mb.count, mb.count * mb.stage_layers
    return StepTime(
        compute_s=repeat * layer.compute_s + count * head_s,
        elementwise_s=repeat * layer.elementwise_s + count * head_memory_s,
        host_s=repeat * layer.host_s + count * head_host_s,
        tensor_s=repeat * layer.tensor_s,
        context_s=repeat * layer.context_s,
        expert_s=repeat * layer.expert_s,
        pipeline_s=pipeline,
        bubble_s=bubble_s(mb, mb.stage_layers * layer_s + transfers),
        data_s=gradient_sync_s(mb, weights, layer_s),
        optimizer_s=optimizer_s(mb, weights),
        fixed_s=efficiency.fixed_ms * 1e-3 + np.zeros(np.shape(count)),
    )


def logits_s(mb: MicroBatch) -> tuple[Array, Array, Array]:
    """Matrix product, memory traffic and host time of the output head and loss, always in bf16.

    Without a wait the host launches ahead. A program that reads back once per micro-batch starts with an idle GPU:
    embedding, head and loss are then exposed, and launch about as many kernels as a layer.
    """
    is_eager = np.asarray(mb.plan.eager_loss, dtype=bool)
    columns = mb.model.vocab / mb.tp
    product = (2 + mb.trained) * gemm_s(mb.tokens, mb.model.width, columns, mb.gpu, mb.efficiency)
    memory = mb.tokens * columns * np.where(is_eager, EAGER_HEAD_BYTES, HEAD_BYTES) / mb.memory_Bps
    return product, memory, np.where(is_eager, launch_s(mb, passes=3.0), 0.0)
