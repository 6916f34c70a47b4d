"""The fabric simulator: rates against a brute-force reference, laws of routing, faults, and published effects."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.fabric.completion import finish_times
from lakh.planner.fabric.edge_colouring import colour_edges
from lakh.planner.fabric.max_min import flow_rates
from lakh.planner.fabric.routing import ROUTINGS, route
from lakh.planner.fabric.simulation import FabricReport, FabricScenario, simulate_fabric
from lakh.planner.fabric.topology import FabricTopology
from lakh.planner.fabric.traffic import collective_phases, schedule_phases
from lakh.planner.fabric.transport import goodput_share
from lakh.spec.cluster import Cluster, Tier, load_cluster
from lakh.spec.collectives import all_reduce

pytestmark = pytest.mark.slow  # numba compiles for some seconds on a machine that has no cache yet

ROCE = load_cluster("llama3-24k-roce")
H100K = load_cluster("h100-100k")


def run(cluster: Cluster = ROCE, **options: object) -> FabricReport:
    return simulate_fabric(cluster, FabricScenario(**options))  # type: ignore[arg-type]


# --- rates ---


def slow_max_min(links: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Progressive filling by its definition: raise all rates together until a link is full."""
    rates, grows = np.zeros(len(links)), np.ones(len(links), dtype=bool)
    while grows.any():
        used, count = np.zeros(len(capacity)), np.zeros(len(capacity))
        for flow, path in enumerate(links):
            for link in path[path >= 0]:
                used[link] += rates[flow]
                count[link] += grows[flow]
        room = np.full(len(capacity), np.inf)
        room[count > 0] = (capacity - used)[count > 0] / count[count > 0]
        rates[grows] += room.min()
        full = room <= room.min() * (1 + 1e-9) + 1e-12
        for flow, path in enumerate(links):
            if full[path[path >= 0]].any():
                grows[flow] = False
    return rates


@pytest.mark.parametrize("seed", range(5))
def test_rates_equal_progressive_filling_by_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    links = np.array([rng.choice(12, size=4, replace=False) for _ in range(30)], dtype=np.int32)
    links[rng.random(links.shape) < 0.2] = -1
    links[:, 0] = rng.integers(0, 12, size=30)
    for path in links:  # a path visits a link once
        path[1:][path[1:] == path[0]] = -1
    capacity = rng.uniform(1, 10, size=12)
    rates, binding = flow_rates(links, capacity)
    np.testing.assert_allclose(rates, slow_max_min(links, capacity), rtol=1e-9)
    load = np.zeros(12)
    for rate, path in zip(rates, links, strict=True):
        load[path[path >= 0]] += rate
    assert (load <= capacity * (1 + 1e-9)).all()
    np.testing.assert_allclose(load[binding], capacity[binding])  # a binding link is full


def test_pfc_holds_back_a_flow_that_shares_only_an_earlier_link() -> None:
    # Flow 0 and 1 share link 0; flow 0 goes on to link 1, which flow 2 fills with it.
    links = np.array([[0, 1], [0, 2], [3, 1]], dtype=np.int32)
    capacity = np.array([10.0, 4.0, 10.0, 10.0])
    assert flow_rates(links, capacity)[0].tolist() == [2.0, 8.0, 2.0]
    assert flow_rates(links, capacity, pfc=True)[0].tolist() == [2.0, 2.0, 2.0]


def test_a_finished_flow_leaves_its_bandwidth_to_the_others() -> None:
    links = np.zeros((2, 1), dtype=np.int32)
    ends = finish_times(links, np.array([10.0]), np.array([10.0, 30.0]))
    assert ends.tolist() == [2.0, 4.0]  # 5 B/s each until 2 s, then 10 B/s
    later = finish_times(links, np.array([10.0]), np.array([10.0, 30.0]), np.array([0.0, 1.0]))
    assert later.tolist() == [1.0, 4.0]


# --- topology and traffic ---


def test_a_path_climbs_to_the_innermost_tier_that_contains_both_ends() -> None:
    topology = FabricTopology(ROCE)
    source = np.zeros(4, dtype=np.int64)
    target = np.array([1, 8, 16, 3072])  # same node, same rack, same zone, another zone
    assert topology.turn_of(source, target).tolist() == [-1, 0, 1, 2]
    links = topology.links(source, target, np.full(4, 5))
    names = [[topology.link_name(link) for link in path if link >= 0] for path in links.tolist()]
    assert names[0] == ["NVLink of GPU 0 up", "NVLink of GPU 1 down"]
    assert names[1] == ["NIC of GPU 0 up", "NIC of GPU 8 down"]
    assert names[2][1:3] == ["rack 0 uplink 5 to zone", "rack 1 uplink 5 from zone"]
    assert names[3][2:4] == ["zone 0 uplink 5 to cluster", "zone 1 uplink 5 from cluster"]


def test_the_uplinks_of_a_zone_have_the_rate_that_oversubscription_leaves() -> None:
    topology = FabricTopology(ROCE)
    rack, zone = topology.stages
    assert rack.num_paths == 16
    assert rack.num_paths * rack.link_Bps == pytest.approx(16 * 50e9)
    assert zone.num_paths * zone.link_Bps == pytest.approx(3072 * 50e9 / 7)


def test_gpus_of_one_rail_share_a_leaf() -> None:
    node, rack, zone, outer = ROCE.tiers
    rails = replace(ROCE, tiers=(node, replace(rack, size=256, rails=True), zone, outer))
    topology = FabricTopology(rails)
    gpus = np.array([0, 8, 248, 1, 256])
    assert topology.leaf_of(gpus).tolist() == [0, 0, 0, 1, 8]
    assert topology.slot_of(gpus).tolist() == [0, 1, 31, 0, 0]
    # On rails a ring over 32 nodes never leaves its leaves.
    report = run(rails, gpus=256, routing="ecmp", order="random")
    assert report.min_fraction == pytest.approx(1.0)
    assert run(gpus=256, routing="ecmp", order="random").min_fraction < 0.5


def test_a_cluster_file_without_racks_says_that_leaves_are_assumed() -> None:
    assert "are assumed" in run(load_cluster("h100-pod"), gpus=64).notes[0]


@pytest.mark.parametrize(("algorithm", "collective"), [("ring", "ring"), ("halving_doubling", "halving-doubling")])
def test_closed_forms_send_what_the_schedules_of_spec_send(algorithm: str, collective: str) -> None:
    nodes, count = 8, 1024
    gpus = [node * 8 for node in range(nodes)]
    built = schedule_phases(lambda rank: all_reduce(algorithm, rank, nodes, count), gpus, 4)
    closed = collective_phases(collective, np.arange(nodes), 8, count * 4, channels=1)

    def sent(phases: list) -> dict[tuple[int, int], float]:
        total: dict[tuple[int, int], float] = {}
        for phase in phases:
            for pair in zip(phase.sources.tolist(), phase.targets.tolist(), strict=True):
                total[pair] = total.get(pair, 0.0) + phase.size_bytes * phase.repeats
        return total

    assert sent(built) == sent(closed)
    assert sum(phase.repeats for phase in built) == sum(phase.repeats for phase in closed)


# --- traffic engineering ---


@pytest.mark.parametrize("degree", [1, 3, 16])
def test_an_edge_colouring_has_as_many_colours_as_the_largest_degree(degree: int) -> None:
    rng = np.random.default_rng(degree)
    left = np.repeat(np.arange(40), degree)
    right = np.concatenate([rng.permutation(40) for _ in range(degree)])  # a regular multigraph
    order = rng.permutation(len(left))
    colours, used = colour_edges(left[order], right[order])
    assert used == degree
    assert colours.max() < degree
    for ends in (left[order], right[order]):
        assert len({(int(end), int(c)) for end, c in zip(ends, colours, strict=True)}) == len(left)


@pytest.mark.parametrize("order", ["rack", "random"])
def test_traffic_engineering_reaches_the_ideal_while_flows_do_not_exceed_uplinks(order: str) -> None:
    report = run(gpus=3072, routing="te", order=order)
    assert report.min_fraction == pytest.approx(1.0)
    assert report.time_s == pytest.approx(report.ideal_s)
    fewer = run(gpus=3072, routing="te", order=order, uplinks=8)
    if order == "rack":  # half of a rack's flows stay inside it: eight leave
        assert fewer.min_fraction == pytest.approx(1.0)
    else:
        assert fewer.min_fraction == pytest.approx(0.5)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_dead_uplink_costs_at_most_a_sixteenth_of_a_rack_under_traffic_engineering(seed: int) -> None:
    topology = FabricTopology(ROCE)
    rng = np.random.default_rng(seed)
    nodes = rng.permutation(384)
    (phase,) = collective_phases("ring", nodes, 8, 1e9)
    topology.kill_uplinks(np.array([7]), np.array([3]))

    def rack_share(routing: str) -> tuple[float, float]:
        """Outgoing and incoming rate of rack 7, as shares of its 16 NICs."""
        routed = route(topology, phase.sources, phase.targets, routing=routing, qps=4, seed=seed)
        rates, _ = flow_rates(routed.links, topology.capacity)
        out = topology.leaf_of(phase.sources)[routed.pair] == 7
        into = topology.leaf_of(phase.targets)[routed.pair] == 7
        return float((rates * out).sum()) / (50e9 * 16), float((rates * into).sum()) / (50e9 * 16)

    out, into = rack_share("te")
    assert min(out, into) >= 15 / 16 - 1 / 128  # flows of other racks that share a downlink lose a little too
    assert min(rack_share("ecmp")) < min(out, into)


# --- published effects ---


@pytest.mark.parametrize(("gpus", "order"), list(product([128, 3072], ["rack", "random"])))
def test_queue_pair_scaling_gains_at_least_the_published_forty_percent(gpus: int, order: str) -> None:
    """Up to +40 % AllReduce over ECMP (Meta, SIGCOMM 2024). Medians over seeds of the hash; monotone in queue pairs."""

    def seconds(routing: str, qps: int) -> float:
        scenarios = (FabricScenario(gpus=gpus, order=order, routing=routing, qps=qps, seed=s) for s in range(1, 8))
        return float(np.median([simulate_fabric(ROCE, scenario).time_s for scenario in scenarios]))

    scaled = [seconds("e-ecmp", qps) for qps in (1, 2, 4, 8, 16)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(scaled))
    assert seconds("ecmp", 4) / seconds("e-ecmp", 4) >= 1.4


def test_whole_messages_in_turn_beat_split_messages() -> None:
    both = [run(gpus=512, order="random", split_messages=split).time_s for split in (False, True)]
    assert both[0] < both[1]


def test_path_pinning_loses_over_thirty_percent_with_half_filled_racks() -> None:
    whole = run(gpus=512, routing="pinned", jobs=2)
    half = run(gpus=512, routing="pinned", jobs=2, fragmented=True)
    assert whole.min_fraction == pytest.approx(1.0)
    assert 1 - half.jobs[0]["min_fraction"] > 0.3
    assert 1 - half.ideal_s / half.time_s > 0.3


def test_flowlets_are_between_hashing_and_traffic_engineering() -> None:
    hashed, moved, engineered = (
        run(gpus=1024, routing=routing, order="random").mean_fraction for routing in ("e-ecmp", "flowlet", "te")
    )
    assert hashed < moved < engineered


# --- laws ---


@pytest.mark.parametrize("routing", ROUTINGS)
def test_more_uplinks_and_fewer_faults_never_slow_a_collective(routing: str) -> None:
    base = run(gpus=512, routing=routing, order="random", seed=3)
    assert run(gpus=512, routing=routing, order="random", seed=3, slow_nics=4).time_s >= base.time_s
    # A hash over other uplinks is another draw, so that only policies that see the load are monotone.
    if routing in ("te", "flowlet", "spray"):
        assert run(gpus=512, routing=routing, order="random", seed=3, uplinks=32).time_s <= base.time_s * (1 + 1e-9)
        assert run(gpus=512, routing=routing, order="random", seed=3, dead_links=8).time_s >= base.time_s * (1 - 1e-9)


def test_results_change_with_the_topology() -> None:
    fat_tree = load_cluster("llama3-24k-ib")
    order = {"gpus": 6144, "routing": "te", "order": "random"}
    assert run(fat_tree, **order).min_fraction == pytest.approx(1.0)
    assert run(ROCE, **order).min_fraction < 0.3  # half of the flows leave their zone, whose uplinks are 1:7
    assert run(ROCE, **{**order, "order": "rack"}).min_fraction == pytest.approx(1.0)


def test_pfc_alone_is_never_faster() -> None:
    for order in ("rack", "random"):
        assert run(gpus=1024, order=order, pfc=True).mean_fraction <= run(gpus=1024, order=order).mean_fraction


def test_a_straggler_binds_the_ring_and_is_named() -> None:
    report = run(gpus=256, routing="te", slow_nics=1)
    assert report.min_fraction == pytest.approx(0.25)
    assert report.binding_links[0]["link"].startswith("NIC of GPU")
    assert report.slowest[0]["fraction"] == pytest.approx(0.25)


def test_admission_caps_the_rate_over_distance() -> None:
    far = replace(ROCE, tiers=(*ROCE.tiers[:-1], replace(ROCE.tiers[-1], latency_us=2000.0)))
    capped = run(far, gpus=6144, routing="te", in_flight_bytes=4e6)
    assert capped.min_fraction == pytest.approx(4e6 / 4e-3 / 50e9)


def test_go_back_n_suffers_from_distance_and_selective_repeat_does_not() -> None:
    near, far = (float(goodput_share("go-back-n", 1e-5, 50e9, rtt_s)) for rtt_s in (1e-5, 1e-2))
    assert near > 0.99
    assert far < 0.5
    assert float(goodput_share("selective-repeat", 1e-5, 50e9, 1e-2)) == pytest.approx(1 - 1e-5)
    assert float(goodput_share("erasure-coding", 1e-5, 50e9, 1e-2)) == pytest.approx(0.9)


def test_spraying_survives_a_dead_switch_and_ecmp_hashes_again() -> None:
    assert run(gpus=3072, routing="spray", order="random", dead_switches=1).min_fraction == pytest.approx(15 / 16)
    for routing in ("ecmp", "e-ecmp", "pinned", "flowlet"):
        assert 0 < run(gpus=512, routing=routing, dead_switches=2).min_fraction <= 1


def test_no_live_path_is_an_answer_with_the_pair() -> None:
    with pytest.raises(InfeasiblePlan, match="has no live path"):
        run(gpus=128, routing="ecmp", dead_switches=16)


# --- scale ---


@pytest.mark.timeout(120)
def test_a_hundred_thousand_gpus_are_routed_without_conflict() -> None:
    report = run(H100K, gpus=98304, routing="te", order="rack")
    assert report.min_fraction == pytest.approx(1.0)
    topology = FabricTopology(H100K)
    (phase,) = collective_phases("ring", np.random.default_rng(1).permutation(12288), 8, 1e9)
    routed = route(topology, phase.sources, phase.targets, routing="te", qps=1, seed=1)
    for column in (1, -2):  # uplinks and downlinks of the leaves
        links = routed.links[:, column]
        assert np.bincount(links[links >= 0]).max() == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpus": 12}, "whole number of nodes"),
        ({"gpus": 49152}, "request fewer"),
        ({"gpus": 128, "fragmented": True}, "give --jobs 2"),
        ({"gpus": 128, "routing": "magic"}, "choose from"),
        ({"gpus": 384, "collective": "halving-doubling"}, "power of two"),
        ({"gpus": 128, "loss": 1.5}, "not a probability"),
        ({"gpus": 16, "dead_links": 99}, "choose at most 16"),
    ],
)
def test_impossible_scenarios_are_refused(options: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        run(**options)


def test_a_cluster_of_one_node_has_no_fabric() -> None:
    with pytest.raises(UserError, match="one tier"):
        run(load_cluster("8xh100"), gpus=8)


def test_a_building_tier_is_one_more_stage() -> None:
    building = Tier(name="region", size=2 * 24576, bandwidth_GBps=50.0, latency_us=500.0, oversubscription=32.0)
    two = replace(ROCE, tiers=(*ROCE.tiers, building))
    topology = FabricTopology(two)
    assert [stage.tier for stage in topology.stages] == ["zone", "cluster", "region"]
    outer = topology.stages[-1]
    assert outer.num_paths * outer.link_Bps == pytest.approx(24576 * 50e9 / 32)
    assert run(two, gpus=2 * 24576, routing="te").min_fraction == pytest.approx(1.0)  # 8 flows cross, 768 could
