"""Exhaustive search: the fastest execution plan that fits, the Pareto front, and why others lost.

Candidates (candidates.py) are arrays, processed in blocks that stay in cache, on all cores (numpy releases the GIL):
memory first, time only for plans that fit. Nothing is sampled: the answer is the best of all candidates. A search
without a feasible plan returns a result with the reason (`best` is None), not an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lakh.planner.calibration.error_bands import configuration_kind
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.program_factor import LAKH, program_factor
from lakh.planner.estimate import USABLE_SHARE, error_bar
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.memory import memory_use
from lakh.planner.search.candidates import SearchConstraints, candidate_plans, single_plan
from lakh.planner.stacked import Array
from lakh.planner.timing.step_time import StepTime, step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["LayoutSearchResult", "search"]

WORTH_SHOWING = 3.0  # times the best step: slower plans save memory at a price that nobody pays
BLOCK = 16384  # plans of one block: some hundred arrays of 128 KB, so that they fit into a core's cache


@dataclass(frozen=True)
class LayoutSearchResult:
    searched: int
    seconds: float
    why: str
    refused: dict[str, int]
    """Reason -> refused candidates."""
    best: dict[str, Any] | None = None
    pareto: list[dict[str, Any]] = field(default_factory=list)
    best_plan: ExecutionPlan | None = None
    hint: str | None = None
    """A number of GPUs nearby that divides better."""


@dataclass(frozen=True)
class _Evaluated:
    """Candidates with their step time (infinite where memory does not suffice), cost and memory."""

    model: Model
    cluster: Cluster
    plans: ExecutionPlan
    step_s: Array
    usd_per_step: Array
    bytes_used: Array
    limit_bytes: float

    @property
    def fits(self) -> Array:
        return self.bytes_used <= self.limit_bytes

    def plan(self, i: int) -> ExecutionPlan:
        return single_plan(self.plans, i)


def search(
    model: Model, cluster: Cluster, limits: SearchConstraints, usd_per_gpu_hour: float = 0.0
) -> LayoutSearchResult:
    """The fastest plan that fits and meets the deadline, and the Pareto front of time, cost and memory."""
    began = time.perf_counter()
    plans, refused = candidate_plans(model, limits)
    count = int(np.size(plans.tp))
    searched = count + sum(refused.values())

    def result(why: str, **found: Any) -> LayoutSearchResult:
        return LayoutSearchResult(searched, time.perf_counter() - began, why, dict(refused), **found)

    if count == 0:
        reason = "; ".join(f"{why}: {n}" for why, n in refused.most_common()) or "no combination divides"
        return result(f"no layout divides: {reason}")
    found = _evaluate(model, plans, cluster, usd_per_gpu_hour)
    usable = found.fits.copy()
    refused["does not fit in memory"] += int((~usable).sum())
    steps = limits.tokens / (limits.batch * limits.sequence) if limits.tokens else None
    if limits.days and steps:
        in_time = found.step_s * steps <= limits.days * 86400
        refused["misses the deadline"] += int((usable & ~in_time).sum())
        usable &= in_time
    if not usable.any():
        return result(_why_nothing(found, limits, steps))
    front = _pareto(found, np.flatnonzero(usable))
    winner = min(front, key=lambda i: (found.step_s[i], found.usd_per_step[i], found.bytes_used[i]))
    best = _row(found, winner, steps)
    kind = configuration_kind(model.num_experts, limits.low_precision, best["gpus"], cluster.node_size)
    best["error_bar"] = error_bar(best["step_s"], *calibration_for(cluster.gpu.family), kind)
    rows = [_row(found, i, steps) for i in front]
    return result(_why(found, usable, winner), best=best, pareto=rows, best_plan=found.plan(winner))


def _evaluate(model: Model, plans: ExecutionPlan, cluster: Cluster, usd_per_gpu_hour: float) -> _Evaluated:
    count = int(np.size(plans.tp))
    step_s, bytes_used = np.full(count, np.inf), np.zeros(count)
    timed = _timing(cluster)
    limit = cluster.gpu.memory_bytes * USABLE_SHARE

    def evaluate_block(start: int) -> None:
        here = slice(start, min(start + BLOCK, count))
        part = _in_float64(plans.take(here))
        used = memory_use(model, part).total_bytes
        bytes_used[here] = used
        good = np.flatnonzero(used <= limit)
        if good.size:
            some = part.take(good) if good.size < used.size else part
            step_s[start + good] = timed(model, some).total_s

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(evaluate_block, range(0, count, BLOCK)))
    usd_per_step = np.where(bytes_used <= limit, step_s, 0.0) * plans.gpus / 3600 * usd_per_gpu_hour
    return _Evaluated(model, cluster, plans, step_s, usd_per_step, bytes_used, limit)


def _timing(cluster: Cluster) -> Callable[[Model, ExecutionPlan], StepTime]:
    """Step time by the calibration of the cluster's GPU type and the factor of lakh's trainer, as in `estimate`."""
    calibration = calibration_for(cluster.gpu.family)[0]
    factor = program_factor(LAKH, cluster.gpu.family, calibration)
    return lambda model, plan: factor.apply(step_time(model, plan, cluster, calibration.efficiency))


def _in_float64(plans: ExecutionPlan) -> ExecutionPlan:
    values = {f.name: getattr(plans, f.name) for f in fields(plans)}
    return replace(plans, **{name: v.astype(float) for name, v in values.items() if np.ndim(v)})


def _pareto(found: _Evaluated, among: Array, most: int = 12) -> list[int]:
    """Indices that nothing beats in time, cost and memory at once; at most `most`, spread over the front."""
    step_s, usd, size = found.step_s, found.usd_per_step, found.bytes_used
    among = among[step_s[among] <= WORTH_SHOWING * step_s[among].min()]
    order = among[np.lexsort((size[among], usd[among], step_s[among]))]
    front: list[int] = []
    best_usd, best_size = math.inf, math.inf
    corners: list[tuple[float, float]] = []
    for i in order[:200_000]:
        if usd[i] < best_usd * (1 - 1e-9) or size[i] < best_size * 0.99:
            if any(u <= usd[i] and s <= size[i] for u, s in corners):
                continue
            front.append(int(i))
            corners.append((float(usd[i]), float(size[i])))
            best_usd, best_size = min(best_usd, float(usd[i])), min(best_size, float(size[i]))
    if len(front) > most:
        front = [front[round(k * (len(front) - 1) / (most - 1))] for k in range(most)]
    return front


def _row(found: _Evaluated, i: int, steps: float | None) -> dict[str, Any]:
    plan, step_s, usd = found.plan(i), float(found.step_s[i]), float(found.usd_per_step[i])
    row = {
        "gpus": int(plan.gpus),
        "name": str(plan),
        **plan.summary(),
        "stages_inside": bool(plan.pp_inside),
        "step_s": step_s,
        "usd_per_step": usd,
        "memory_bytes": float(found.bytes_used[i]),
    }
    if steps:
        row |= {"run_days": step_s * steps / 86400, "run_usd": usd * steps}
    return row


def _why(found: _Evaluated, usable: Array, winner: int) -> str:
    """Compare the winner with the fastest plan that has other degrees of parallelism, part by part."""
    best, plans, step_s = found.plan(winner), found.plans, found.step_s
    sentences = [f"{best} takes {step_s[winner]:.4g} s"]
    other = usable & ((plans.tp != best.tp) | (plans.pp != best.pp) | (plans.cp != best.cp))
    if other.any():
        rival = int(np.flatnonzero(other)[np.argmin(step_s[other])])
        timed = _timing(found.cluster)
        ours, theirs = (timed(found.model, plan) for plan in (best, found.plan(rival)))
        gaps = {name: float(getattr(theirs, name) - getattr(ours, name)) for name in vars(ours)}
        extremes = {max(gaps, key=gaps.__getitem__), min(gaps, key=gaps.__getitem__)}  # largest loss and largest gain
        parts = [f"{gap:+.3g} s in {name.removesuffix('_s')}" for name, gap in gaps.items() if name in extremes and gap]
        parts.sort(key=lambda part: part.startswith("-"))
        more = step_s[rival] / step_s[winner] - 1
        sentences.append(f"the runner-up {found.plan(rival)} takes {more:.1%} more: {', '.join(parts)}")
    sentences.append(f"{int((~found.fits).sum()):,} layouts need more than {found.limit_bytes / 2**30:.1f} GiB")
    return "; ".join(sentences)


def _why_nothing(found: _Evaluated, limits: SearchConstraints, steps: float | None) -> str:
    if not found.fits.any():
        least = int(np.argmin(found.bytes_used))
        return (
            f"nothing fits: the smallest, {found.plan(least)}, needs {found.bytes_used[least] / 2**30:.1f} GiB of "
            f"{found.limit_bytes / 2**30:.1f}; use more GPUs, or GPUs with more memory"
        )
    assert steps is not None
    fastest = int(np.argmin(found.step_s))
    return (
        f"nothing is fast enough: the best, {found.plan(fastest)}, takes "
        f"{found.step_s[fastest] * steps / 86400:.1f} days of {limits.days:g}; use more GPUs or fewer tokens"
    )
