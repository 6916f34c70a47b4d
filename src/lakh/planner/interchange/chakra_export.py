"""A planned step as execution traces, one per rank, for simulators that read Chakra (ASTRA-sim, SimAI).

Computation is a node per operation of the pipeline schedule, with the planner's seconds. Communication has bytes and
no time: that is the other simulator's work. The collectives of an operation's layers are joined into one node per kind,
so their launches and their overlap inside a layer are not represented. Reductions of gradients follow the last backward
pass of a stage.

comm_size is the whole buffer: what an all-reduce and a reduce-scatter take, what an all-gather makes, what one rank
sends in an all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.program_factor import LAKH, program_factor
from lakh.planner.execution_plan import FULL, ExecutionPlan
from lakh.planner.interchange.chakra_trace import COLLECTIVE_TYPES, AttributeValue, TraceNode
from lakh.planner.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, PipelineSchedule
from lakh.planner.schedules.orders import build_schedule
from lakh.planner.timing.data_parallel import StageWeights
from lakh.planner.timing.expert_exchange import dispatched_bytes
from lakh.planner.timing.layer import MicroBatch
from lakh.planner.timing.step_time import step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["StepTraces", "step_traces"]

MOST_NODES = 4_000_000
"""Of all ranks: some 400 MB of files."""
Collectives = list[tuple[str, str, float]]
"""Collective, axis, bytes."""


@dataclass
class StepTraces:
    schedule: PipelineSchedule
    ranks: int
    groups: dict[str, list[int]]
    """Name of a process group -> its ranks, as ASTRA-sim's file of communicator groups."""
    builder: TraceBuilder

    def nodes(self, rank: int) -> list[TraceNode]:
        return self.builder.rank_nodes(rank)


def step_traces(model: Model, plan: ExecutionPlan, cluster: Cluster, *, program: str = LAKH) -> StepTraces:
    """Traces of one step of a single plan; rank r is on GPU r."""
    for name, off in (("shard", 1.0), ("offload", 0.0), ("adapters", 0.0)):
        if float(getattr(plan, name)) != off:
            found = f"{name} {float(getattr(plan, name)):g} has traffic that the traces do not represent"
            raise InfeasiblePlan("lakh plan chakra export", found, "use --zero 0, 1 or 2")
    builder = TraceBuilder(model, plan, cluster, program)
    count = len(builder.schedule.operations[0]) * int(plan.gpus)
    if count > MOST_NODES:
        found = f"{int(plan.gpus):,} ranks x {len(builder.schedule.operations[0]):,} operations"
        raise UserError("lakh plan chakra export", f"{found} are too many", f"stay below {MOST_NODES:,} in all")
    return StepTraces(builder.schedule, int(plan.gpus), builder.groups, builder)


@dataclass
class RankTrace:
    """The nodes of a rank so far."""

    nodes: list[TraceNode] = field(default_factory=list)

    def add(
        self, name: str, kind: str, depends_on: Sequence[int] = (), seconds: float = 0.0, **more: AttributeValue
    ) -> int:
        attributes: dict[str, AttributeValue] = {"is_cpu_op": False, **more}
        number = len(self.nodes)
        self.nodes.append(TraceNode(number, name, kind, tuple(depends_on), round(seconds * 1e6), attributes))
        return number


class TraceBuilder:
    def __init__(self, model: Model, plan: ExecutionPlan, cluster: Cluster, program: str) -> None:
        calibration, _ = calibration_for(cluster.gpu.family)
        factor = program_factor(program, cluster.gpu.family, calibration)
        step = factor.apply(step_time(model, plan, cluster, calibration.efficiency))
        self.model, self.plan = model, plan
        self.mb = MicroBatch(model, plan, cluster, calibration.efficiency)
        self.count = round(float(plan.micro_batches))
        self.schedule = build_schedule(plan.schedule, int(plan.pp), self.count, int(plan.chunks))
        busy_s = float(step.compute_s + step.elementwise_s + step.host_s) / self.count / self.schedule.stages_per_rank
        forward_s = busy_s / (4 if int(plan.recompute) == FULL else 3)
        backward_s = busy_s - forward_s
        self.seconds = {
            FORWARD: forward_s, BACKWARD: backward_s, INPUT: backward_s - forward_s, WEIGHT: forward_s
        }  # fmt: skip
        self.end_s = float(step.optimizer_s + step.fixed_s)
        self.groups: dict[str, list[int]] = {}
        self.group_of: dict[tuple[str, int], str] = {}
        for axis, size, stride in self._axes():
            self._add_groups(axis, size, stride)

    def _axes(self) -> Iterator[tuple[str, int, int]]:
        plan = self.plan
        yield "tp", int(plan.tp), int(plan.tensor_stride)
        yield "cp", int(plan.cp), int(plan.context_stride)
        yield "dp", int(plan.data_ranks * plan.cp), int(plan.gradient_stride)
        if self.mb.has_experts:
            copies = float(StageWeights(self.mb).copies)
            yield "ep", int(plan.ep), int(plan.expert_stride)
            yield "experts", int(copies), int(np.asarray(plan.ep) * plan.expert_stride)

    def _add_groups(self, axis: str, size: int, stride: int) -> None:
        if size == 1:
            return
        ranks = np.arange(int(self.plan.gpus))
        for first in ranks[ranks // stride % size == 0].tolist():
            name, members = str(len(self.groups)), [first + stride * i for i in range(size)]
            self.groups[name] = members
            self.group_of.update({(axis, rank): name for rank in members})

    def rank_nodes(self, rank: int) -> list[TraceNode]:
        plan, schedule, trace = self.plan, self.schedule, RankTrace()
        stage_stride, stages = int(plan.stage_stride), int(plan.pp)
        position = rank // stage_stride % stages
        last_backward: dict[int, int] = {}
        last: list[int] = []  # what the next operation waits for
        size = int(self.mb.stream_bytes / self.mb.tp)
        for operation in schedule.operations[position]:
            kind, stage, micro_batch = operation
            arrived = list(last)
            is_forward = kind == FORWARD
            if kind != WEIGHT and not (schedule.is_first(stage) if is_forward else schedule.is_last(stage)):
                source = rank + stage_stride * (self._at(stage, -1 if is_forward else 1) - position)
                tag = self._tag(is_forward, stage - 1 if is_forward else stage, micro_batch)
                if source != rank:
                    arrived.append(
                        trace.add(f"receive {operation}", "receive", comm_src=source, comm_dst=rank, comm_tag=tag,
                                  comm_size=size)
                    )  # fmt: skip
            here = trace.add(str(operation), "compute", arrived, self.seconds[kind])
            for collective, axis, size_bytes in self._layer_collectives(kind):
                here = self._collective(trace, rank, f"{axis} {operation}", collective, axis, size_bytes, [here])
            last = [here]
            if kind in (BACKWARD, WEIGHT):
                last_backward[stage] = here
            if kind != WEIGHT and not (schedule.is_last(stage) if is_forward else schedule.is_first(stage)):
                target = rank + stage_stride * (self._at(stage, 1 if is_forward else -1) - position)
                tag = self._tag(is_forward, stage if is_forward else stage - 1, micro_batch)
                if target != rank:
                    trace.add(f"send {operation}", "send", [here], comm_src=rank, comm_dst=target, comm_tag=tag,
                              comm_size=size)  # fmt: skip
        reduced, gathers = [], []
        for stage, here in sorted(last_backward.items()):
            for collective, axis, size_bytes in self._gradient_collectives():
                if collective == "all_gather":
                    gathers.append((f"{axis} weights {stage}", collective, axis, size_bytes))
                    continue
                name = f"{axis} gradients {stage}"
                reduced.append(self._collective(trace, rank, name, collective, axis, size_bytes, [here]))
        end = trace.add("optimizer", "compute", sorted({*last, *reduced}), self.end_s)
        for gather in gathers:
            self._collective(trace, rank, *gather, [end])
        return trace.nodes

    def _at(self, stage: int, step: int) -> int:
        """Pipeline position of the stage before or after."""
        return self.schedule.stage_ranks[stage + step]

    def _tag(self, is_forward: bool, boundary: int, micro_batch: int) -> int:
        """Of a transfer: direction, boundary between two stages, micro-batch."""
        return (boundary * self.count + micro_batch) * 2 + (0 if is_forward else 1)

    def _collective(
        self, trace: RankTrace, rank: int, name: str, collective: str, axis: str, size_bytes: float, after: list[int]
    ) -> int:
        number = COLLECTIVE_TYPES.index(collective)
        group = self.group_of[axis, rank]
        return trace.add(name, "collective", after, comm_type=number, comm_size=round(size_bytes), pg_name=group)

    def _layer_collectives(self, kind: str) -> Collectives:
        """Of all layers of one operation: what timing/layer.py counts per layer and pass."""
        if kind == WEIGHT:
            return []
        plan, mb, found = self.plan, self.mb, Collectives()
        layers = float(mb.stage_layers) / self.schedule.stages_per_rank
        passes = 1.0 if kind == FORWARD else 1.0 + float(mb.repeated)
        if int(plan.tp) > 1:
            stream = float(mb.stream_bytes) * layers
            if plan.sequence_parallel:
                again = 0.0 if kind == FORWARD else stream
                found += [
                    ("all_gather", "tp", 2 * stream * passes + again),
                    ("reduce_scatter", "tp", 2 * stream * passes),
                ]
            else:
                found.append(("all_reduce", "tp", 2 * stream * passes))
        if int(plan.cp) > 1:
            model = self.model
            heads = 2 * model.kv_heads * model.head_dim / float(plan.tp)
            width = model.kv_rank + model.rope_dim if model.is_latent else heads
            gathered = float(mb.tokens * plan.cp) * float(width) * 2.0 * layers
            found.append(("all_gather", "cp", gathered * (1 if kind == FORWARD else 2 + float(mb.repeated))))
        if mb.has_experts and int(plan.ep) > 1:
            sent = float(dispatched_bytes(plan, mb.stream_bytes)) * self.model.top_k
            found.append(("all_to_all", "ep", 2 * sent * passes * layers * float(mb.mixture_share)))
        return found

    def _gradient_collectives(self) -> Collectives:
        """Of one stage: an all-reduce, or with ZeRO a reduce-scatter and an all-gather of the weights."""
        weights, parts, found = StageWeights(self.mb), self.schedule.stages_per_rank, Collectives()
        axes = (("dp", float(weights.dense)), ("experts", float(weights.experts)))
        for axis, parameters in axes:
            if parameters == 0 or (axis, 0) not in self.group_of:
                continue
            gradients = parameters * float(weights.gradient_bytes) / parts
            if int(self.plan.zero) >= 1:
                found += [("reduce_scatter", axis, gradients), ("all_gather", axis, parameters * 2.0 / parts)]
            else:
                found.append(("all_reduce", axis, gradients))
        return found
