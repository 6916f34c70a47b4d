"""Latency and bandwidth of each tier and of slow hosts are measured once, alike on all ranks, and decide."""

import json
import threading
from pathlib import Path

import pytest

from lakh.c3 import native
from lakh.c3.bootstrap import MemoryStore
from lakh.c3.group import Group
from lakh.c3.links import Network, measured_network, probes, to_links, with_network
from lakh.c3.selection import choose_all_reduce
from lakh.c3.topology import Link, Topology, read_topology

RACKS = Topology(tuple((f"h{rank // 2}", f"r{rank // 4}", "") for rank in range(8)))


def test_hosts_of_two_racks_talk_at_once_to_find_the_trunk() -> None:
    assert probes(RACKS) == {"host": [(0, 2)], "rack": [(0, 4), (2, 6)]}


def test_one_host_has_no_links() -> None:
    assert probes(Topology((("h", "", ""),) * 3)) == {}


def test_only_zones_that_differ_are_crossed_for_a_zone() -> None:
    zones = Topology((("a", "r", "z0"), ("b", "r", "z1")))
    assert probes(zones) == {"zone": [(0, 1)]}


def test_an_outer_tier_does_not_count_the_latency_of_the_inner_ones() -> None:
    links = to_links({"host": 30.0, "rack": 100.0}, {"host": 1e9, "rack": 2e9})
    assert links == {"host": Link(1e9, 30.0), "rack": Link(2e9, 70.0)}
    assert to_links({"host": 30.0, "rack": 20.0}, {"host": 1e9, "rack": 2e9})["rack"].delay_us == 0.0


def test_what_is_measured_decides() -> None:
    far = Topology(tuple((f"h{rank}", "", "") for rank in range(8)))
    slow = choose_all_reduce(far, 1000, 4, links={"host": Link(1e9, 10_000.0)})
    assert slow.algorithm == "flat"  # two stages of latency beside six or fourteen
    assert slow.seconds > 0.02


FOUR = Topology(tuple((f"h{rank}", "", "") for rank in range(4)), {"host": Link(50e6)})


def test_a_slow_host_that_no_file_confesses_gets_a_smaller_part() -> None:
    known, links = with_network(FOUR, Network({}, {"//h1": 12.5e6, "//elsewhere": 1.0}))
    choice = choose_all_reduce(known, 2_000_000, 4, links=links)
    assert choice.rates == (50e6, 12.5e6, 50e6, 50e6)
    assert "h1 12.5 MB/s (measured) beside 50 of other hosts" in choice.reason
    assert with_network(known, Network({}, {}))[0] == FOUR  # measured again, and found as fast as the others


def test_what_a_file_says_of_a_cable_is_believed() -> None:
    told = Topology(FOUR.places, FOUR.links, {"//h1": 40e6})
    known, _ = with_network(told, Network({}, {"//h1": 12.5e6, "//h2": 10e6}))
    assert known.cables == {"//h1": 40e6, "//h2": 10e6}
    assert "h1 40 MB/s (told), h2 10 MB/s (measured)" in choose_all_reduce(known, 2_000_000, 4).reason


def test_places_are_told_without_links(tmp_path: Path) -> None:
    file = tmp_path / "told.toml"
    file.write_text(RACKS.as_toml(links=False))
    told = read_topology(file, 8)
    assert (told.places, told.links, told.cables) == (RACKS.places, {}, {})


@pytest.mark.timeout(200)
@pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++")
def test_all_ranks_learn_the_same_figures_and_the_next_start_reads_them(tmp_path: Path) -> None:
    def start() -> list[dict[str, Link]]:
        store, found = MemoryStore(60.0), [dict[str, Link]()] * 3

        def one(rank: int) -> None:
            group = Group.meet(store, rank, 3, timeout_s=60.0, place=(f"h{rank}", "", ""))
            found[rank] = measured_network(group, cache=str(tmp_path)).links
            group.close()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    first = start()
    assert first[0] == first[1] == first[2]
    assert first[0]["host"].bytes_per_s > 1e6
    assert first[0]["host"].delay_us > 0
    (kept,) = tmp_path.iterdir()
    figures = json.loads(kept.read_text())
    figures["figures"][0] = 1234.0
    kept.write_text(json.dumps(figures))
    assert start()[2]["host"].delay_us == 1234.0
    kept.write_text("damaged")
    assert start()[1]["host"].delay_us != 1234.0
