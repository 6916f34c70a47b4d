"""A step at higher fidelity: its pipeline through the timeline, its flows through the simulated network.

`lakh plan estimate` uses closed forms: routing spreads flows evenly, and a pipeline's bubble is a formula. Here the
flows of the data-parallel and context-parallel rings and of the pipeline, one per GPU, take the paths of a routing
policy, and the slowest pair sets the rate, compared with packets spread evenly over all paths. The schedule's timeline
with the time of each transfer replaces the bubble and the exposed transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lakh.errors import UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.program_factor import LAKH, program_factor
from lakh.planner.execution_plan import FULL, ExecutionPlan
from lakh.planner.fabric.max_min import flow_rates
from lakh.planner.fabric.routing import route
from lakh.planner.fabric.topology import FabricTopology, Ints
from lakh.planner.schedules.long_step import long_step_s
from lakh.planner.schedules.operations import PipelineSchedule
from lakh.planner.schedules.orders import build_schedule
from lakh.planner.schedules.timeline import OperationSeconds
from lakh.planner.timing.collectives import send_s
from lakh.planner.timing.efficiency import Efficiency
from lakh.planner.timing.layer import MicroBatch
from lakh.planner.timing.step_time import StepTime, step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["NicShares", "SimulatedStep", "nic_shares", "simulate_step"]

MICRO_BATCH_PARTS = ("compute_s", "elementwise_s", "host_s", "tensor_s", "context_s", "expert_s")
MOST_FLOWS = 4_000_000
"""Pairs of GPUs times queue pairs of one simulation; some 2 GB of memory."""


@dataclass(frozen=True)
class NicShares:
    """What routing leaves of a NIC, relative to packets that are spread evenly: the slowest pair of each pattern."""

    ring: float
    """Of the data-parallel and context-parallel rings, the slower."""
    send: float
    """Of the transfers between pipeline stages."""


@dataclass(frozen=True)
class SimulatedStep:
    closed: StepTime
    """By closed forms, as `lakh plan estimate`."""
    simulated: StepTime
    shares: NicShares


def simulate_step(
    model: Model, plan: ExecutionPlan, cluster: Cluster, *, program: str = LAKH, routing: str = "e-ecmp",
    qps: int = 16, seed: int = 1,
) -> SimulatedStep:  # fmt: skip
    """One plan, rank r on GPU r."""
    calibration, _ = calibration_for(cluster.gpu.family)
    factor = program_factor(program, cluster.gpu.family, calibration)
    closed = factor.apply(step_time(model, plan, cluster, calibration.efficiency))
    shares = nic_shares(plan, cluster, routing=routing, qps=qps, seed=seed)
    efficiency = replace(
        calibration.efficiency,
        nic=calibration.efficiency.nic * shares.ring,
        send=calibration.efficiency.send * shares.send,
    )
    routed = factor.apply(step_time(model, plan, cluster, efficiency))
    return SimulatedStep(closed, _with_timeline(model, plan, cluster, efficiency, routed, factor.elsewhere), shares)


def _with_timeline(
    model: Model, plan: ExecutionPlan, cluster: Cluster, efficiency: Efficiency, step: StepTime, elsewhere: float
) -> StepTime:  # fmt: skip
    """The step with the bubble of its schedule's timeline. Transfers that overlap with computation still slow it down
    (`pipeline_s`); those of a schedule without work beside them are waits of the timeline."""
    stages, count, chunks = int(plan.pp), round(float(plan.micro_batches)), int(plan.chunks)
    if stages == 1:
        return step
    busy_s = sum(float(getattr(step, name)) for name in MICRO_BATCH_PARTS) / count
    forward = busy_s / (4 if int(plan.recompute) == FULL else 3)
    seconds = OperationSeconds(forward=forward, input=busy_s - 2 * forward, weight=forward)
    mb = MicroBatch(model, plan, cluster, efficiency)
    hop_s = float(send_s(mb.fabric, mb.stream_bytes / mb.tp, plan.stage_stride, plan.pp)[1]) * elsewhere
    overlaps = chunks > 1 and float(plan.chunks_ahead) >= 2 and bool(plan.overlap)
    name = plan.schedule

    def schedule_of(micro_batches: int) -> PipelineSchedule:
        return build_schedule(name, stages, micro_batches, chunks)

    total_s = long_step_s(schedule_of, stages, count, seconds, [hop_s] * (stages - 1))
    return replace(step, bubble_s=total_s - count * busy_s, pipeline_s=step.pipeline_s if overlaps else 0.0)


def nic_shares(plan: ExecutionPlan, cluster: Cluster, *, routing: str, qps: int, seed: int = 1) -> NicShares:
    """Simulate the flows of each pattern of a plan, all GPUs at once."""
    if int(plan.gpus) * qps > MOST_FLOWS:
        found = f"{int(plan.gpus):,} GPUs x {qps} queue pairs"
        raise UserError(f"--qps {qps}", f"{found} are too many flows", f"give at most {MOST_FLOWS // int(plan.gpus)}")
    ranks = np.arange(int(plan.gpus), dtype=np.int64)
    rings = [(int(plan.data_ranks), int(plan.data_stride)), (int(plan.cp), int(plan.context_stride))]
    flows = [_ring(ranks, size, stride, cluster.node_size) for size, stride in rings if size > 1]
    stage = ranks // int(plan.stage_stride) % int(plan.pp)
    sources = ranks[stage < int(plan.pp) - 1]
    sends = (sources, sources + int(plan.stage_stride))
    topologies = FabricTopology(cluster, pooled=routing == "spray"), FabricTopology(cluster, pooled=True)

    def share(flows: tuple[Ints, Ints]) -> float:
        between = flows[0] // cluster.node_size != flows[1] // cluster.node_size
        pairs = flows[0][between], flows[1][between]
        if not len(pairs[0]):
            return 1.0
        routed, even = (
            _slowest_Bps(topology, *pairs, name, number, seed)
            for topology, name, number in zip(topologies, (routing, "spray"), (qps, 1), strict=True)
        )
        return min(routed / even, 1.0)

    return NicShares(min(map(share, flows), default=1.0), share(sends))


def _ring(ranks: Ints, size: int, stride: int, node_size: int) -> tuple[Ints, Ints]:
    """Each rank sends to the same NIC's rank in the next node of its ring."""
    in_node = min(max(node_size // stride, 1), size)
    index = ranks // stride % size
    return ranks, ranks + ((index + in_node) % size - index) * stride


def _slowest_Bps(topology: FabricTopology, sources: Ints, targets: Ints, routing: str, qps: int, seed: int) -> float:
    routed = route(topology, sources, targets, routing=routing, qps=qps, seed=seed)
    rates, _ = flow_rates(routed.links, topology.capacity)
    return float(np.bincount(routed.pair, weights=rates).min())
