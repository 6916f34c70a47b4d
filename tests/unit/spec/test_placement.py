"""Each mesh axis uses the innermost network tier that contains its ranks, with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import ConfigError
from lakh.spec import Mesh
from lakh.spec.cluster import load_cluster
from lakh.spec.mesh import AXES, Axis
from lakh.spec.placement import place_axes

CLUSTER = load_cluster("llama3-24k-roce")


def test_the_axis_with_most_traffic_is_innermost() -> None:
    mesh = Mesh(dp_replicate=8, pp=4, dp_shard=16, cp=2, tp=8).resolve(8192)
    found = {place.axis: (place.stride, place.tier) for place in place_axes(mesh, CLUSTER)}
    assert found == {
        "tp": (1, "node"),
        "cp": (8, "rack"),
        "dp_shard": (16, "zone"),
        "pp": (256, "zone"),
        "dp_replicate": (1024, "cluster"),
    }
    outermost = place_axes(mesh, CLUSTER)[-1]
    assert outermost.bandwidth_GBps == 50 / 7  # aggregation is oversubscribed
    assert "sums gradients once per step; 8 ranks at a stride of 1024 span 8192 GPUs" in outermost.reason


def test_tensor_parallelism_beyond_a_node_states_the_lost_bandwidth() -> None:
    (place,) = place_axes(Mesh(tp=16, dp_shard=1), CLUSTER)
    assert place.tier == "rack"
    assert "outside a node of 8 GPUs, where bandwidth is 9 times higher" in place.reason


def test_a_requested_order_is_used_and_named_in_the_reason() -> None:
    """With replicas inside a node, their all-reduce uses the fast links and the shards use the slow ones."""
    order = ("pp", "tp", "dp_shard", "cp", "dp_replicate")
    mesh = Mesh(dp_replicate=8, dp_shard=16, order=order).resolve(128)
    inner, outer = place_axes(mesh, CLUSTER)
    assert (inner.axis, inner.stride, inner.tier) == ("dp_replicate", 1, "node")
    assert (outer.axis, outer.stride, outer.tier) == ("dp_shard", 8, "zone")
    assert outer.reason.endswith("placed by mesh.order")
    assert mesh.coordinates(9) == {"dp_replicate": 1, "cp": 0, "dp_shard": 1, "tp": 0, "pp": 0}


@given(st.permutations(AXES))
def test_coordinates_are_unique_in_any_order(order: list[Axis]) -> None:
    mesh = Mesh(dp_replicate=2, pp=3, dp_shard=2, cp=2, tp=2, order=tuple(order))
    places = [tuple(mesh.coordinates(rank)[axis] for axis in AXES) for rank in range(mesh.ranks)]
    assert len(set(places)) == mesh.ranks == 48
    leaders = [rank for rank in range(mesh.ranks) if mesh.leads_stage(rank)]
    assert sorted(mesh.coordinates(rank)["pp"] for rank in leaders) == [0, 1, 2]


def test_an_order_names_every_axis_once() -> None:
    with pytest.raises(ConfigError, match="is not an order of the axes; name each once"):
        Mesh(order=("tp", "cp"))


def test_one_rank_has_no_placed_axes() -> None:
    assert place_axes(Mesh(dp_shard=1), CLUSTER) == []


def test_the_first_rank_of_a_stage_leads_it() -> None:
    mesh = Mesh(dp_replicate=2, pp=2, dp_shard=2, tp=2).resolve(16)
    assert [rank for rank in range(16) if mesh.leads_stage(rank)] == [0, 4]
    assert {mesh.data_rank(rank) for rank in range(16)} == set(range(mesh.data_ranks))
