"""Schedules on real processes: every operation runs, and a step takes at least as long as its operations and delays."""

from __future__ import annotations

import pytest
from bench.plan.pipeline import WAIT_S, run_pipeline

from lakh.planner.schedules.orders import build_schedule
from lakh.planner.schedules.timeline import OperationSeconds, simulate_schedule


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 1)])
def test_a_real_pipeline_is_never_faster_than_its_timeline(name: str, chunks: int) -> None:
    schedule, delays = build_schedule(name, 2, 4, chunks), [2 * WAIT_S]
    seconds, measured_s = run_pipeline(schedule, delays, steps=1, waits=True)
    assert seconds.forward >= WAIT_S
    least = OperationSeconds(forward=WAIT_S, input=WAIT_S, weight=WAIT_S)
    assert measured_s >= simulate_schedule(schedule, least, delays).total_s
