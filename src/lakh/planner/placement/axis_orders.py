"""Axes of parallelism on the tiers of a network: every order of the axes, with its time and the reason.

Ranks are numbered from the inside outwards, so the order of the axes decides which tier each one communicates over: the
first axis has neighbours as partners, the last one the farthest. All orders of the axes in use are timed with the model
of `lakh plan estimate`. Orders within TIE of the fastest are equal: of these the usual one comes first.

Experts are spread over the innermost ranks of a stage (or over data ranks, where every expert is split), wherever the
order puts these.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import permutations
from typing import Any

import numpy as np

from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.program_factor import LAKH, program_factor
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.stacked import Array
from lakh.planner.timing.step_time import StepTime, step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["AXES", "AxisOrder", "OrderedPlan", "axis_orders"]

AXES = ("tp", "cp", "dp", "pp")
"""In their usual order, innermost first."""
TIE = 0.01
"""Differences below this share of a step are far below the error of an estimate."""
# axis -> part of a step that its communication is
PARTS = {"tp": "tensor_s", "cp": "context_s", "dp": "data_s", "pp": "pipeline_s", "ep": "expert_s"}


@dataclass(frozen=True, kw_only=True)
class OrderedPlan(ExecutionPlan):
    """A plan whose axes are numbered in this order, innermost first."""

    order: tuple[str, ...] = AXES

    @classmethod
    def from_plan(cls, plan: ExecutionPlan, order: tuple[str, ...]) -> OrderedPlan:
        return cls(**{f.name: getattr(plan, f.name) for f in fields(plan)}, order=order)

    def degree(self, axis: str) -> float:
        return float(self.data_ranks if axis == "dp" else getattr(self, axis))

    def stride(self, axis: str) -> float:
        inside = self.order[: self.order.index(axis)] if axis in self.order else ()
        return float(np.prod([self.degree(one) for one in inside]))

    @property
    def tensor_stride(self) -> Array:
        return self.stride("tp")

    @property
    def context_stride(self) -> Array:
        return self.stride("cp")

    @property
    def data_stride(self) -> Array:
        return self.stride("dp")

    @property
    def gradient_stride(self) -> Array:
        """Of data and context ranks together; where another axis lies between them, spread evenly over their span."""
        span = max(self.stride(axis) * self.degree(axis) for axis in ("dp", "cp"))
        return span / (self.degree("dp") * self.degree("cp"))

    @property
    def stage_stride(self) -> Array:
        return self.stride("pp")

    @property
    def expert_stride(self) -> Array:
        if not self.whole_experts:
            return self.stride("dp")
        return min((self.stride(axis) for axis in self.order if axis != "pp"), default=1.0)


@dataclass(frozen=True)
class AxisOrder:
    order: tuple[str, ...]
    """Innermost axis first; axes of degree 1 are left out."""
    step_s: float
    tiers: dict[str, str]
    """Axis -> the innermost tier that holds one of its groups."""
    seconds: dict[str, float]
    """Axis -> exposed communication of the step."""
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "order": list(self.order),
            **{name: getattr(self, name) for name in ("step_s", "tiers", "seconds", "reason")},
        }


def axis_orders(model: Model, plan: ExecutionPlan, cluster: Cluster, program: str = LAKH) -> list[AxisOrder]:
    """All orders of the axes that the plan uses, fastest first, and the usual order first among equals."""
    calibration, _ = calibration_for(cluster.gpu.family)
    factor = program_factor(program, cluster.gpu.family, calibration)
    used = [axis for axis in AXES if float(plan.data_ranks if axis == "dp" else getattr(plan, axis)) > 1]
    plans = [OrderedPlan.from_plan(plan, order) for order in permutations(used)]
    timed = [(one, factor.apply(step_time(model, one, cluster, calibration.efficiency))) for one in plans]
    least_s = min(float(step.total_s) for _, step in timed)

    def rank(pair: tuple[OrderedPlan, StepTime]) -> tuple[float, list[int]]:
        seconds = float(pair[1].total_s)
        usual = [AXES.index(axis) for axis in pair[0].order]
        return (least_s if seconds <= least_s * (1 + TIE) else seconds, usual)

    timed.sort(key=rank)
    best = timed[0]
    return [_described(one, step, best, cluster) for one, step in timed]


def _described(
    plan: OrderedPlan, step: StepTime, best: tuple[OrderedPlan, StepTime], cluster: Cluster
) -> AxisOrder:  # fmt: skip
    axes = [*plan.order, *(["ep"] if float(plan.ep) > 1 else [])]
    tiers = {axis: _tier(plan, axis, cluster) for axis in axes}
    seconds = {axis: float(getattr(step, PARTS[axis])) for axis in axes}
    return AxisOrder(plan.order, float(step.total_s), tiers, seconds, _reason(plan, step, tiers, best, cluster))


def _tier(plan: OrderedPlan, axis: str, cluster: Cluster) -> str:
    """The innermost tier whose groups hold whole groups of an axis."""
    stride = float(plan.expert_stride) if axis == "ep" else plan.stride(axis)
    block = stride * float(plan.ep if axis == "ep" else plan.degree(axis))
    fitting = [tier for tier in cluster.tiers if tier.size >= plan.gpus or (tier.size % block == 0)]
    return (fitting or [cluster.tiers[-1]])[0].name


def _reason(
    plan: OrderedPlan, step: StepTime, tiers: dict[str, str], best: tuple[OrderedPlan, StepTime], cluster: Cluster
) -> str:  # fmt: skip
    first, fastest = best
    if plan is first:
        axis = max(tiers, key=lambda one: float(getattr(step, PARTS[one])), default="")
        if not axis or not float(getattr(step, PARTS[axis])):
            return "no exposed communication"
        return f"most exposed: {axis} over {tiers[axis]}, {float(getattr(step, PARTS[axis])):.3g} s"
    slower = {f.name: float(getattr(step, f.name)) - float(getattr(fastest, f.name)) for f in fields(step)}
    worst = max(slower, key=lambda name: slower[name])
    if abs(float(step.total_s) / float(fastest.total_s) - 1) <= TIE:
        return f"within {TIE:.0%} of the first"
    axis = next((axis for axis, part in PARTS.items() if part == worst and axis in tiers), "")
    if not axis:
        return f"{worst.removesuffix('_s')}: {slower[worst]:+.3g} s"
    before = _tier(first, axis, cluster)
    moved = f"over {tiers[axis]}" + (f" instead of {before}" if before != tiers[axis] else ", farther apart")
    return f"{axis} {moved}: {slower[worst]:+.3g} s"
