"""Topology files are validated, and the algorithm follows from the topology, with a reason."""

from dataclasses import replace

import pytest
from bench.comm.emulation import first_ranks, to_toml
from bench.comm.slow_ranks import find_slow_ranks

from lakh.c3.faults.membership import decide_membership, find_reachable
from lakh.c3.selection import choose_all_reduce, fastest_first
from lakh.c3.topology import WIRES, Link, Topology, Wire, numa_node, read_topology
from lakh.errors import UserError

RACKS = Topology(
    tuple((f"h{rank}", f"r{rank // 2}", "") for rank in range(4)), {"host": Link(1e8), "rack": Link(1.25e7)}
)


def test_racks_lead_to_hierarchical() -> None:
    choice = choose_all_reduce(RACKS, 2_000_000, 4)
    assert choice.algorithm == "hierarchical"
    assert "ring" in choice.reason
    # The buffer once over the trunk, half of it twice over each host's link, inside its rack.
    assert choice.seconds == pytest.approx(8e6 / 1.25e7 + 8e6 / 1e8, rel=0.01)


def test_small_data_uses_few_stages_and_large_data_few_bytes() -> None:
    far = Topology(tuple((f"h{rank}", "", "") for rank in range(8)), {"host": Link(1e9, 500)})
    assert choose_all_reduce(far, 10, 4).algorithm == "flat"
    assert choose_all_reduce(far, 10, 4).seconds == pytest.approx(1e-3, rel=0.01)


def test_a_slow_host_owns_less_and_is_last_in_trees() -> None:
    hosts = Topology(tuple((f"h{rank}", "", "") for rank in range(4)), {"host": Link(50e6)}, {"//h1": 12.5e6})
    choice = choose_all_reduce(hosts, 2_000_000, 4)
    assert (choice.algorithm, choice.rates) == ("flat", (50e6, 12.5e6, 50e6, 50e6))
    # Its input once, and the first scatter and the last gather, which overlap nothing; equal parts take 1.5 inputs.
    assert choice.seconds == pytest.approx(8e6 / 12.5e6 * 17 / 16, rel=0.01)
    assert "flat with unequal parts" in choice.reason
    assert "flat 960 ms" in choice.reason
    assert fastest_first(hosts) == (0, 2, 3, 1)
    assert fastest_first(RACKS) is None


def test_16_bit_sums_are_never_rounded_at_every_hop() -> None:
    far = Topology(tuple((f"h{rank}", "", "") for rank in range(8)))
    assert choose_all_reduce(far, 50_000_000, 2).algorithm == "flat"


def test_beyond_64_ranks_the_10_mb_rule_applies() -> None:
    many = Topology(tuple((f"h{rank}", "", "") for rank in range(100)))
    assert choose_all_reduce(many, 10, 4).algorithm == "halving_doubling"
    large = choose_all_reduce(many, 10_000_000, 4)
    assert large.algorithm == "ring"
    assert "fallback" in large.reason


def test_a_path_names_every_link_on_it() -> None:
    assert RACKS.path(0, 0) == []
    assert [tier for tier, _, _ in RACKS.path(0, 1)] == ["host", "host"]
    assert [tier for tier, _, _ in RACKS.path(0, 2)] == ["host", "host", "rack", "rack"]
    assert RACKS.distance(0, 2) == "rack"


def test_the_numa_node_that_contains_all_cores_is_found(tmp_path) -> None:
    for node, cores in enumerate(["0-3,8", "4-7", ""]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert numa_node([2, 8], tmp_path) == 0
    assert numa_node([5], tmp_path) == 1
    assert numa_node([3, 4], tmp_path) is None
    assert numa_node([3], tmp_path / "nowhere") is None


BAD = {
    "no hosts": "x = 1",
    "not TOML": "[[hosts",
    "a rank twice": '[[hosts]]\nname="a"\nranks=[0,1]\n[[hosts]]\nname="b"\nranks=[1]',
    "a rank missing": '[[hosts]]\nname="a"\nranks=[0]\n[[hosts]]\nname="b"\nranks=[2]',
    "a host twice": '[[hosts]]\nname="a"\nranks=[0]\n[[hosts]]\nname="a"\nranks=[1]',
    "an unknown key of a host": '[[hosts]]\nname="a"\nranks=[0,1]\ncolour="red"',
    "a host without bandwidth": '[[hosts]]\nname="a"\nranks=[0,1]\nMbit_per_s=0',
    "a link without bandwidth": '[[hosts]]\nname="a"\nranks=[0,1]\n[links.host]\nMbit_per_s=0',
    "a wire without connections": '[[hosts]]\nname="a"\nranks=[0,1]\n[wire.zone]\nstreams=0',
    "an unknown key of a wire": '[[hosts]]\nname="a"\nranks=[0,1]\n[wire.zone]\nspeed=1',
    "a link of an unknown tier": '[[hosts]]\nname="a"\nranks=[0,1]\n[links.moon]\nMbit_per_s=1',
}


@pytest.mark.parametrize("bad", BAD)
def test_a_topology_file_is_refused_with(bad, tmp_path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(BAD[bad])
    with pytest.raises(UserError, match="topology"):
        read_topology(path, 2)


def test_a_file_configures_the_transport_of_a_tier(tmp_path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text('[[hosts]]\nname="a"\nranks=[0,1]\n[wire.zone]\nstreams=16\n')
    wires = read_topology(path, 2).wires
    assert wires["zone"] == Wire(16, WIRES["zone"].chunk_KB, WIRES["zone"].in_flight_KB)
    assert wires["host"] == WIRES["host"]


def test_a_topology_is_written_as_it_was_read_and_limited_to_its_first_ranks(tmp_path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(
        '[[hosts]]\nname="a"\nrack="r"\nranks=[0,2]\n[[hosts]]\nname="b"\nranks=[1,3]\nMbit_per_s=50\n'
        "[links.host]\nMbit_per_s=800\n[links.rack]\nMbit_per_s=100\ndelay_us=5\n[wire.zone]\nstreams=3\n"
    )
    read = read_topology(path, 4)
    path.write_text(to_toml(read, links=True))
    assert replace(read_topology(path, 4), digest=read.digest) == read
    path.write_text(to_toml(read, links=False))
    silent = read_topology(path, 4)
    assert (silent.places, silent.links, silent.host_rates, silent.wires) == (read.places, {}, {}, WIRES)
    assert first_ranks(read, 1).places == read.places[:1]
    assert first_ranks(read, 1).host_rates == {}
    assert first_ranks(read, 2).host_rates == read.host_rates


def test_a_link_between_racks_is_compared_with_other_links_between_racks() -> None:
    places = [("a", "r0", ""), ("b", "r0", ""), ("c", "r0", ""), ("d", "r0", ""), ("e", "r1", "")]
    topology = Topology(tuple(places))
    pairs = {(a, b): 0.1 if b == 4 else 1.0 for a in range(5) for b in range(a + 1, 5)}
    assert find_slow_ranks(pairs, 5, topology)["ranks"] == []
    assert find_slow_ranks(pairs, 5)["ranks"] == [4]
    assert find_slow_ranks(pairs | {(0, b): 0.1 for b in (1, 2, 3)}, 5, topology)["ranks"] == [0]
    found = find_slow_ranks(pairs | {(1, 4): 0.01}, 5, topology)
    assert (found["ranks"], found["links"]) == ([], [[1, 4]])
    assert "nothing to compare" in find_slow_ranks({(0, 1): 1.0}, 2)["reason"]


def test_a_slow_rank_is_distinguished_from_a_slow_link() -> None:
    pairs = {(a, b): 1.0 for a in range(4) for b in range(a + 1, 4)}
    assert find_slow_ranks(pairs, 4)["ranks"] == find_slow_ranks(pairs, 4)["links"] == []
    node = {pair: 0.1 if 2 in pair else rate for pair, rate in pairs.items()}
    node |= {(0, 1): 1.0, (0, 3): 1.0, (1, 3): 1.1}
    assert find_slow_ranks({**node, (0, 1): 2.0, (1, 3): 2.0, (0, 3): 2.0}, 4)["ranks"] == [2]
    link = pairs | {(1, 3): 0.1}
    found = find_slow_ranks(link, 4)
    assert (found["ranks"], found["links"]) == ([], [[1, 3]])
    assert "1-3" in found["reason"]


@pytest.mark.parametrize(
    ("registered", "action", "members"),
    [
        ((0, 1, 2, 3), "continue", (0, 1, 2, 3)),
        ((0, 2, 3), "continue", (0, 2, 3)),
        ((2, 3), "continue", (2, 3)),  # half: the store decides
        ((3,), "stop", (3,)),
    ],
)
def test_membership_after_a_loss(registered, action, members) -> None:
    decision = decide_membership(range(4), registered)
    assert (decision.action, decision.members) == (action, members)
    assert all(str(rank) in decision.reason for rank in set(range(4)) - set(registered))


def test_a_returning_rank_joins() -> None:
    decision = decide_membership((0, 2), (0, 2), (1,))
    assert (decision.action, decision.members, decision.dead) == ("continue", (0, 1, 2), ())
    assert decide_membership((0, 2), (0,), min_ranks=2).action == "stop"


def test_a_rank_with_a_cut_link_is_excluded() -> None:
    assert find_reachable([0, 1, 2], {0: [2], 1: [2], 2: [0, 1]}) == [0, 1]
    assert find_reachable([0, 1, 2], {0: [], 1: [], 2: []}) == [0, 1, 2]
    assert find_reachable([0, 1], {0: [1], 1: [0]}) == [0]
    # the disconnected rank may be the only one that has noticed so far
    assert find_reachable([0, 1, 2, 3], {0: [], 1: [], 2: [], 3: [0, 1, 2]}) == [0, 1, 2]
