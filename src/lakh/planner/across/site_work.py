"""Seconds and memory of layouts inside one site, from the model that `lakh plan estimate` uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lakh.planner.across.layout_rows import LayoutRows
from lakh.planner.across.pipeline_forms import bubble_stages
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.program_factor import LAKH, ProgramFactor, program_factor
from lakh.planner.estimate import USABLE_SHARE
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.memory import memory_use
from lakh.planner.stacked import Array
from lakh.planner.timing.data_parallel import GradientTraffic, StageWeights, gradient_traffic, optimizer_s
from lakh.planner.timing.efficiency import Efficiency
from lakh.planner.timing.layer import MicroBatch, layer_time
from lakh.planner.timing.pipeline import pipeline_s
from lakh.planner.timing.step_time import logits_s
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["SiteTimes", "SiteWork"]


@dataclass(frozen=True)
class SiteTimes:
    """Of the pipelines of one group, as far as one of its sites computes them."""

    stage_s: Array
    """A micro-batch on the slowest stage, with the logits."""
    busy_s: Array
    """The step without data-parallel traffic: all micro-batches, bubble, transfers inside the site, optimizer."""
    bubble_s: Array
    gradients: GradientTraffic
    fits: Array


class SiteWork:
    """One model on the GPUs of one site, with a share of each NIC that routing leaves."""

    def __init__(self, model: Model, cluster: Cluster, sequence: int, nic_share: float) -> None:
        self.model, self.cluster, self.sequence = model, cluster, sequence
        calibration, _ = calibration_for(cluster.gpu.family)
        efficiency = calibration.efficiency
        self.efficiency: Efficiency = replace(efficiency, nic=efficiency.nic * nic_share)
        self.factor: ProgramFactor = program_factor(LAKH, cluster.gpu.family, calibration)
        self.limit_bytes = cluster.gpu.memory_bytes * USABLE_SHARE

    def layer_s(self, rows: LayoutRows) -> Array:
        """One layer of one micro-batch; rows that differ only in what does not matter for it are computed once."""
        keys = np.stack([rows.tp, rows.cp, rows.ep, rows.micro_batch, rows.recompute], axis=1)
        unique, index = np.unique(keys, axis=0, return_inverse=True)
        columns = dict(zip(("tp", "cp", "ep", "micro_batch", "recompute"), unique.T, strict=True))
        replicas = self.cluster.gpus / (columns["tp"] * columns["cp"])
        plan = ExecutionPlan(
            gpus=replicas * columns["tp"] * columns["cp"],
            sequence=float(self.sequence),
            batch=4 * replicas * columns["micro_batch"],
            sequence_parallel=(columns["tp"] > 1).astype(float),
            tensor_overlap=1.0,
            **columns,
        )
        layer = layer_time(MicroBatch(self.model, plan, self.cluster, self.efficiency))
        on_gpu = layer.compute_s + layer.elementwise_s + layer.host_s
        elsewhere = layer.tensor_s + layer.context_s + layer.expert_s
        seconds: Array = on_gpu * self.factor.on_gpu + elsewhere * self.factor.elsewhere
        return seconds[index.ravel()]

    def times(self, rows: LayoutRows, plan: ExecutionPlan, layer_s: Array, layers: Array) -> SiteTimes:
        """Of a group's plan; a stage in this site has `layers` layers."""
        mb = MicroBatch(self.model, plan, self.cluster, self.efficiency)
        even = np.ceil(self.model.layers / rows.stages)
        on_gpu, elsewhere = self.factor.on_gpu, self.factor.elsewhere
        head = sum(logits_s(mb)) * on_gpu
        transfers, exposed = (part * elsewhere for part in pipeline_s(mb, head))
        stage = layers * layer_s
        bubble = bubble_stages(rows.kind, rows.chunks, rows.stages, mb.count) * (stage + transfers)
        weights = StageWeights(mb)
        optimizer = optimizer_s(mb, weights) * on_gpu * layers / even
        fixed = self.efficiency.fixed_ms * 1e-3 * on_gpu
        busy = mb.count * (stage + head) + exposed + bubble + optimizer + fixed
        traffic = gradient_traffic(mb, weights, layer_s)
        used = memory_use(self.model, plan)
        grows = used.total_bytes - used.context_bytes - used.logits_bytes
        total = grows * layers / even + used.context_bytes + used.logits_bytes
        return SiteTimes(stage + head, busy, bubble, traffic, total <= self.limit_bytes)
