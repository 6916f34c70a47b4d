"""Each axis of a mesh is carried by the innermost tier that holds it, and says why."""

from lakh.spec import Mesh
from lakh.spec.cluster import load_cluster
from lakh.spec.placement import place_axes

CLUSTER = load_cluster("llama3-24k-roce")


def test_what_talks_most_lies_innermost() -> None:
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


def test_matrices_cut_up_beyond_a_node_say_what_it_costs() -> None:
    (place,) = place_axes(Mesh(tp=16, dp_shard=1), CLUSTER)
    assert place.tier == "rack"
    assert "more than a node of 8, where it would be 9 times faster" in place.reason


def test_one_rank_talks_to_nobody() -> None:
    assert place_axes(Mesh(dp_shard=1), CLUSTER) == []


def test_the_first_rank_of_a_stage_speaks_for_it() -> None:
    mesh = Mesh(dp_replicate=2, pp=2, dp_shard=2, tp=2).resolve(16)
    assert [rank for rank in range(16) if mesh.leads_stage(rank)] == [0, 4]
    assert {mesh.data_rank(rank) for rank in range(16)} == set(range(mesh.data_ranks))
