"""Load of the cuts between racks and zones: closed forms against counted flows, and what they mean for a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lakh.errors import UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.placement.cut_load import PlacedRanks, ring_crossing, send_crossing
from lakh.planner.timing.step_time import StepTime, step_time
from lakh.spec.cluster import Cluster, load_cluster

ROCE = load_cluster("llama3-24k-roce")
MODEL = load_model("llama3-405b")


@pytest.mark.parametrize(
    ("size", "stride", "ranks"),
    [
        (128, 8, 16384),
        (512, 8, 16384),
        (64, 64, 8192),
        (4, 1, 4096),
        (2048, 8, 16384),
        (16, 1024, 16384),
        (384, 8, 6144),
    ],
)
@pytest.mark.parametrize("group", [16, 3072])
def test_closed_forms_equal_counted_flows(size: int, stride: int, ranks: int, group: int) -> None:
    in_node = max(min(8 // stride, size), 1)
    placed = PlacedRanks(np.arange(ranks), 8)
    counted = float(placed.ring_crossing(size, stride, in_node)(group))
    closed = float(ring_crossing(size * stride, in_node * stride, ranks, group))
    block = size * stride
    if group % block == 0 or block % group == 0:
        assert closed == counted
    else:  # where a group's boundary falls inside a ring, the closed form takes the fuller of its cases
        assert counted <= closed <= 2 * counted
    flows, _ = send_crossing(stride, size, ranks, group)
    sent, _ = placed.send_crossing(stride, size, group)
    assert float(flows) == sent


def test_a_placement_keeps_nodes_whole() -> None:
    with pytest.raises(UserError, match="several nodes"):
        PlacedRanks(np.array([0, 9, 2, 3, 4, 5, 6, 7, 8, 1, 10, 11, 12, 13, 14, 15]), 8)
    with pytest.raises(UserError, match="two ranks"):
        PlacedRanks(np.zeros(8), 8)


def changed(oversubscription: float = 1.0, latency_us: float = 22.0) -> Cluster:
    outer = replace(ROCE.tiers[-1], oversubscription=oversubscription, latency_us=latency_us)
    return replace(ROCE, tiers=(*ROCE.tiers[:-1], outer))


def step(cluster: Cluster, placed: PlacedRanks | None = None, **axes: float) -> StepTime:
    base = {"gpus": 16384, "sequence": 8192, "batch": 2048, "tp": 8, "sequence_parallel": 1, "gradient_bytes": 4}
    plan = ExecutionPlan.of(**{**base, "tensor_overlap": 1, **axes})
    return step_time(MODEL, plan, cluster, calibration_for("H100")[0].efficiency, placed)


def test_a_pipeline_over_several_zones_feels_their_uplinks_and_latency() -> None:
    """16 stages of 1,024 GPUs on zones of 3,072: whole stages send across the boundary of a zone."""
    axes = {"pp": 16, "zero": 2, "chunks": 8}
    times = [float(step(changed(k), **axes).total_s) for k in (1.0, 7.0, 100.0)]
    assert times[0] < times[1] < times[2]
    assert float(step(changed(latency_us=2000.0), **axes).total_s) > times[0]


def test_a_node_ordered_ring_over_several_zones_needs_few_uplinks() -> None:
    """Data groups of 512 nodes: 8 NICs x 4 stages cross a boundary, 1.6 of 21.9 TB/s."""
    axes = {"pp": 4, "zero": 2}
    near, far = (float(step(changed(k), **axes).data_s) for k in (1.0, 7.0))
    assert far == pytest.approx(near)
    assert float(step(changed(2000.0), **axes).data_s) > near  # until even these are too many


def test_nodes_in_random_order_pay_at_the_zone_boundary() -> None:
    nodes = np.random.default_rng(1).permutation(16384 // 8)
    gpus = (nodes[:, None] * 8 + np.arange(8)).ravel()
    packed = step(changed(7.0), PlacedRanks(np.arange(16384), 8), pp=4, zero=2)
    shuffled = step(changed(7.0), PlacedRanks(gpus, 8), pp=4, zero=2)
    assert float(packed.total_s) == pytest.approx(float(step(changed(7.0), pp=4, zero=2).total_s), rel=0.01)
    assert float(shuffled.data_s) > 3 * float(packed.data_s)


def test_more_bandwidth_never_slows_a_step() -> None:
    for axes in ({"pp": 16, "zero": 1}, {"pp": 4, "zero": 1}, {"shard": 2048}, {"pp": 8, "pp_inside": 1, "zero": 1}):
        times = [float(step(changed(k), **axes).total_s) for k in (1.0, 2.0, 7.0, 50.0, 1000.0)]
        assert times == sorted(times)
