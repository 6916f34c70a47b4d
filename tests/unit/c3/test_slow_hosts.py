"""A host whose link is much slower is found by exchanges with other hosts; noise is not reported."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.c3.network.slow_hosts import find_slow_hosts, probe_rounds
from lakh.c3.topology import Topology


def hosts(count: int, ranks_each: int = 1) -> Topology:
    return Topology(tuple((f"h{rank // ranks_each}", "", "") for rank in range(count * ranks_each)))


@given(st.integers(3, 40), st.integers(1, 3))
def test_each_host_has_one_peer_per_round_and_no_pair_repeats(count: int, ranks_each: int) -> None:
    meetings = probe_rounds(hosts(count, ranks_each))
    assert len(meetings) == 3
    for pairs in meetings:
        busy = list(chain(*pairs))
        assert len(busy) == len(set(busy)) == count - count % 2
    pairs_met = list(chain(*meetings))
    assert len(pairs_met) == len(set(pairs_met))
    everybody = set(chain(*pairs_met))
    assert everybody == {host * ranks_each for host in range(count)}  # the first rank of each host


def test_only_hosts_of_one_rack_are_compared_and_not_fewer_than_three() -> None:
    assert probe_rounds(hosts(2)) == []
    racks = Topology((*((f"a{n}", "r0", "") for n in range(3)), ("b0", "r1", ""), ("b1", "r1", "")))
    assert set(chain(*chain(*probe_rounds(racks)))) == {0, 1, 2}


@given(st.integers(4, 24), st.data())
def test_one_slow_host_is_found_and_its_peers_are_not(count: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, count - 1))
    factor = st.floats(0.8, 1.0)  # noise of a shared network
    topology = hosts(count)
    reached = [0.0] * count
    for one, other in chain(*probe_rounds(topology)):
        rate = (25e6 if slow in (one, other) else 100e6) * data.draw(factor)
        for rank in (one, other):
            reached[rank] = max(reached[rank], rate)
    found = find_slow_hosts(topology.hosts, reached)
    assert list(found.slow) == [f"//h{slow}"]
    assert f"h{slow} " in found.reason


def test_half_of_the_hosts_may_be_slow() -> None:
    found = find_slow_hosts(hosts(4).hosts, [100e6, 25e6, 100e6, 26e6])
    assert (set(found.slow), found.typical) == ({"//h1", "//h3"}, 100e6)


@pytest.mark.parametrize("reached", [[1e9, 0.6e9, 0.9e9], [1e9, 0.1e9], [0.0, 0.0, 1e9]])
def test_noise_and_too_few_hosts_report_no_host(reached: list[float]) -> None:
    found = find_slow_hosts(hosts(len(reached)).hosts, reached)
    assert not found.slow
    assert found.reason
