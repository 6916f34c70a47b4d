"""The speed of the planner, and of Calculon if a checkout of it is given.

Calculon's time is of one configuration, compiled and run repeatedly in one warm process, as its own search does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.harness import BenchRow
from bench.plan.calculon import one_step
from lakh.planner.catalogue import load_model
from lakh.planner.estimate import estimate_plan
from lakh.planner.execution_plan import FULL, ExecutionPlan
from lakh.planner.fabric.simulation import FabricScenario, simulate_fabric
from lakh.planner.reliability.failures import load_failures
from lakh.planner.reliability.goodput import FailureScenario, RecoveryPolicy, simulate
from lakh.planner.search.candidates import SearchConstraints
from lakh.planner.search.layout_search import search
from lakh.spec.cluster import load_cluster

__all__ = ["bench_plan"]


def bench_plan(calculon: str | None = None, repeats: int = 20) -> list[BenchRow]:
    theirs = one_step(calculon, repeats) if calculon else None  # first: a wrong folder fails at once
    place = load_cluster("llama3-24k-roce")
    big = load_model("llama3-405b")
    limits = SearchConstraints(batch=2048, sequence=8192, gpus=(4096, 8192, 16384), tokens=15.6e12)
    search(
        big, place, SearchConstraints(batch=2048, sequence=8192, gpus=(256,))
    )  # warm-up: the calibration is read once
    began = time.perf_counter()
    found = search(big, place, limits, 2.0)
    rows = [_row("search: 405B on 4,096 to 16,384 GPUs", "lakh", found.searched, time.perf_counter() - began)]

    one, pod = load_model("gpt-1t"), load_cluster("a100-pod")
    layout = ExecutionPlan(
        gpus=3072.0, sequence=2048.0, batch=3072.0, micro_batch=4.0, tp=4.0, pp=64.0, recompute=float(FULL), zero=1.0,
        sequence_parallel=1.0, flash=0.0, overlap=0.0,
    )  # fmt: skip
    estimate_plan(one, layout, pod)
    best, spread = _timed(lambda: estimate_plan(one, layout, pod), repeats)
    step_s = estimate_plan(one, layout, pod).step_s
    rows.append(_row("one estimate: 1T on 3,072 A100", "lakh", repeats, spread, best, step_s))
    if theirs:
        what = rows[-1]["what"]
        rows.append(_row(what, "calculon", repeats, theirs["seconds"], theirs["each_s"], theirs["step_s"]))

    known = load_failures("llama3")
    scene = FailureScenario(gpus=16384, days=54.0, mtbf_s=known.mtbf_s(16384), replacing_share=known.replacing_share)
    began = time.perf_counter()
    result = simulate(scene, RecoveryPolicy(), runs=10_000)
    spent = time.perf_counter() - began
    rows.append(_row(f"54-day runs at 16,384 GPUs (goodput {result.goodput:.1%})", "lakh", 10_000, spent))
    return rows + _fabric_rows()


def _fabric_rows() -> list[BenchRow]:
    """Rings over the GPUs of a cluster with four queue pairs, after numba has compiled."""
    place, rows = load_cluster("h100-100k"), []
    for gpus, order, routing in (
        (24576, "random", "e-ecmp"),
        (98304, "rack", "e-ecmp"),
        (98304, "random", "e-ecmp"),
        (98304, "rack", "te"),
    ):
        simulate_fabric(place, FabricScenario(gpus=128, order=order, routing=routing))
        report = simulate_fabric(place, FabricScenario(gpus=gpus, order=order, routing=routing))
        rows.append(_row(f"ring over {gpus:,} GPUs, {order} order, {routing}", "lakh", report.flows, report.seconds))
    return rows


def _timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times), sum(times)


def _row(
    what: str, system: str, count: int, seconds: float, each: float | None = None, step_s: float | None = None
) -> BenchRow:
    return {
        "what": what,
        "system": system,
        "count": count,
        "seconds": seconds,
        "seconds_each": each if each is not None else seconds / count,
        "simulated_step_s": step_s if step_s is not None else "",
    }
