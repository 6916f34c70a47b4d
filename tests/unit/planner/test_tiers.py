"""Axes of parallelism on tiers: all orders, their reasons, and clusters side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from lakh.errors import UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.placement.axis_orders import TIE, OrderedPlan, axis_orders
from lakh.planner.placement.build_choice import bisection_Bps, compare_builds, parse_build
from lakh.planner.timing.step_time import step_time
from lakh.spec.cluster import load_cluster

Json = Callable[[str], dict[str, Any]]
Lakh = Callable[..., tuple[int, str, str]]
ROCE, MODEL = load_cluster("llama3-24k-roce"), load_model("llama3-405b")


def plan(**changes: float) -> ExecutionPlan:
    sizes = {"gpus": 16384, "sequence": 8192, "batch": 2048, "tp": 8, "pp": 16, "cp": 2, "zero": 1, "chunks": 8,
             "sequence_parallel": 1, "tensor_overlap": 1}  # fmt: skip
    return ExecutionPlan.of(**(sizes | changes))


@pytest.mark.parametrize("inside", [0, 1])
def test_an_order_of_the_plan_itself_takes_the_time_of_the_plan(inside: int) -> None:
    efficiency = calibration_for("H100")[0].efficiency
    order = ("tp", "cp", "pp", "dp") if inside else ("tp", "cp", "dp", "pp")
    ordered = OrderedPlan.from_plan(plan(), order)
    for name in ("tensor_stride", "context_stride", "data_stride", "stage_stride"):
        assert float(getattr(ordered, name)) == float(getattr(plan(pp_inside=inside), name))
    # context ranks of stages inside data ranks are no regular group: both count them differently
    alone = plan(cp=1, pp_inside=inside)
    assert float(step_time(MODEL, OrderedPlan.from_plan(alone, order), ROCE, efficiency).total_s) == pytest.approx(
        float(step_time(MODEL, alone, ROCE, efficiency).total_s)
    )


def test_all_orders_are_timed_with_a_reason() -> None:
    orders = axis_orders(MODEL, plan(), ROCE)
    assert {one.order for one in orders} == set(permutations(("tp", "cp", "pp", "dp")))
    fastest = min(one.step_s for one in orders)
    assert orders[0].step_s <= fastest * (1 + TIE)
    assert orders[0].order == ("tp", "cp", "pp", "dp")
    assert all(one.reason for one in orders)
    assert orders[0].tiers == {"tp": "node", "cp": "rack", "pp": "zone", "dp": "cluster"}
    last = orders[-1]
    assert last.order[-1] == "tp"
    assert last.reason.startswith("tp over cluster")
    assert last.step_s > 5 * fastest


def test_axes_of_degree_one_have_no_tier() -> None:
    orders = axis_orders(MODEL, plan(cp=1, pp=1, chunks=1), ROCE)
    assert {one.order for one in orders} == {("tp", "dp"), ("dp", "tp")}


def test_experts_are_on_the_innermost_ranks() -> None:
    model = load_model("mixtral-8x7b")
    moe = plan(gpus=256, batch=256, cp=1, pp=4, chunks=1, tp=1, ep=8)
    orders = axis_orders(model, moe, ROCE)
    assert orders[0].tiers["ep"] == "node"
    assert orders[0].order[0] == "dp"
    stages_first = next(one for one in orders if one.order[0] == "pp")
    assert stages_first.tiers["ep"] != "node"
    assert stages_first.seconds["ep"] > orders[0].seconds["ep"]


def test_the_order_matters_less_without_oversubscription() -> None:
    flat = replace(ROCE, tiers=(*ROCE.tiers[:-1], replace(ROCE.tiers[-1], oversubscription=1.0)))
    spread: dict[bool, float] = {}
    for cluster in (ROCE, flat):
        seconds = {one.order: one.step_s for one in axis_orders(MODEL, plan(), cluster)}
        spread[cluster is flat] = seconds["tp", "cp", "dp", "pp"] / seconds["tp", "cp", "pp", "dp"]
    assert spread[True] < spread[False]


def test_inputs_of_a_build() -> None:
    build = parse_build("llama3-24k-roce,build_days=90,network_usd_per_gpu=5000,oversubscription=2")
    assert (build.build_days, build.network_usd_per_gpu, build.cluster.tiers[-1].oversubscription) == (90, 5000, 2)
    assert bisection_Bps(build.cluster) == pytest.approx(24576 / 2 * 50e9 / 2)
    rows = [row for row, _ in compare_builds(MODEL, plan(), [build, parse_build("llama3-24k-ib")], tokens=1e12)]
    assert rows[0]["done_after_days"] == pytest.approx(rows[0]["run_days"] + 90)
    assert rows[1]["done_after_days"] == rows[1]["run_days"]
    assert rows[0]["network_usd"] == 5000 * 24576
    assert rows[0]["usd_per_gpu_hour"] < rows[1]["usd_per_gpu_hour"]  # the price book has 6,000 USD
    for text, told in (("llama3-24k-ib,colour=3", "unknown input"), ("llama3-24k-ib,build_days=x", "give a number"),
                       ("llama3-24k-ib,oversubscription=0.5", "larger")):  # fmt: skip
        with pytest.raises(UserError, match=told):
            parse_build(text)


def test_the_command(lakh: Lakh, last_line: Json) -> None:
    words = ["plan", "tiers", "--model", "llama3-70b", "--gpus", "1024", "--tp", "8", "--pp", "4", "--tokens", "1e12"]
    words += ["--cluster", "llama3-24k-roce,build_days=90", "--cluster", "llama3-24k-ib,build_days=120"]
    code, out, _ = lakh(*words, "--json")
    assert code == 0
    rows = last_line(out)["clusters"]
    assert [row["cluster"] for row in rows] == ["llama3-24k-roce", "llama3-24k-ib"]
    assert all(len(row["orders"]) == 6 for row in rows)
    assert rows[1]["bisection_TBps"] == pytest.approx(7 * rows[0]["bisection_TBps"])
    code, out, _ = lakh(*words)
    assert code == 0
    assert "side by side" in out
    code, _, err = lakh(*words, "--batch", "7")
    assert code == 2
    assert "batch" in err
