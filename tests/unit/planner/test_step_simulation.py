"""A step through network and schedule: near the closed forms where they hold, and near published runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lakh.errors import UserError
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.step_simulation import nic_shares, simulate_step
from lakh.planner.validation.published_steps import compare_published, load_published_steps
from lakh.spec.cluster import load_cluster

Json = Callable[[str], dict[str, Any]]
Lakh = Callable[..., tuple[int, str, str]]
ROCE, MODEL = load_cluster("llama3-24k-roce"), load_model("llama3-70b")


def plan(**changes: float) -> ExecutionPlan:
    sizes = {"gpus": 512, "sequence": 8192, "batch": 512, "tp": 8, "pp": 4, "zero": 1, "sequence_parallel": 1}
    return ExecutionPlan.of(**(sizes | changes))


def test_even_spreading_and_traffic_engineering_leave_the_whole_nic() -> None:
    for routing in ("spray", "te"):
        shares = nic_shares(plan(), ROCE, routing=routing, qps=4)
        assert (shares.ring, shares.send) == pytest.approx((1.0, 1.0))


def test_more_queue_pairs_leave_more_of_the_nic() -> None:
    inside = plan(pp_inside=1)  # data ranks of different racks
    rings = [nic_shares(inside, ROCE, routing="e-ecmp", qps=qps).ring for qps in (1, 4, 32)]
    assert rings == sorted(rings)
    assert rings[0] < 0.6 < rings[-1]


def test_one_node_has_no_flows_and_no_bubble() -> None:
    one = plan(gpus=8, pp=1, batch=8)
    found = simulate_step(MODEL, one, ROCE)
    assert (found.shares.ring, found.shares.send) == (1.0, 1.0)
    assert vars(found.simulated) == vars(found.closed)


@pytest.mark.parametrize("schedule", [{}, {"gpipe": 1}, {"chunks": 4}, {"chunks": 4, "chunks_ahead": 1}])
def test_a_fast_network_has_the_pipeline_of_the_closed_form(schedule: dict[str, float]) -> None:
    node, *outer = ROCE.tiers
    quick = (replace(tier, bandwidth_GBps=200.0, latency_us=0.0, oversubscription=1.0) for tier in outer)
    fast = replace(ROCE, tiers=(node, *quick))
    found = simulate_step(MODEL, plan(**schedule), fast, routing="spray")
    simulated, closed = (float(step.bubble_s + step.pipeline_s) for step in (found.simulated, found.closed))
    assert simulated == pytest.approx(closed, rel=0.1)  # launches of transfers count differently


def test_worse_routing_never_makes_a_step_faster() -> None:
    inside = plan(pp_inside=1)
    seconds = [
        float(simulate_step(MODEL, inside, ROCE, routing=routing, qps=1).simulated.total_s)
        for routing in ("spray", "e-ecmp")
    ]
    assert seconds == sorted(seconds)


def test_keys_and_values_gathered_first_are_exposed() -> None:
    long = plan(sequence=131072, batch=32, cp=4, pp=1)
    context = [
        float(simulate_step(MODEL, replace(long, context_overlap=overlap), ROCE, routing="spray").closed.context_s)
        for overlap in (1.0, 0.0)
    ]
    assert 0 < context[0] < context[1]


def test_llama_3_405b_is_within_three_points_of_the_published_mfu() -> None:
    rows = compare_published(load_published_steps())
    assert [row["published_mfu"] for row in rows] == [0.43, 0.41, 0.38]
    assert max(abs(row["points"]) for row in rows) <= 3


def test_too_many_flows_are_refused() -> None:
    with pytest.raises(UserError, match="too many flows"):
        nic_shares(plan(gpus=24576 * 8), ROCE, routing="e-ecmp", qps=64)


def test_the_command(lakh: Lakh, last_line: Json) -> None:
    words = ["plan", "step", "--model", "llama3-70b", "--cluster", "llama3-24k-roce", "--gpus", "256", "--tp", "8"]
    code, out, _ = lakh(*words, "--pp", "4", "--schedule", "lean", "--chunks", "4", "--json")
    assert code == 0
    data = last_line(out)
    closed, simulated = data["closed_form"], data["through_network_and_schedule"]
    assert sum(simulated["parts_s"].values()) == pytest.approx(simulated["step_s"])
    assert 0.9 < closed["step_s"] / simulated["step_s"] < 1.1
    code, out, _ = lakh(*words, "--pp", "4")
    assert code == 0
    assert "network and schedule" in " ".join(out.split())
    code, _, err = lakh(*words, "--pp", "5")
    assert code == 2
    assert "not a multiple of tp x pp x cp" in err
