"""Latency and bandwidth of tiers and slow hosts are measured once, equal on all ranks, and used for selection."""

import json
import threading
from pathlib import Path

import pytest
from bench.comm.emulation import to_toml
from torch.distributed import HashStore

from lakh.c3 import native
from lakh.c3.group import CommGroup
from lakh.c3.network.links import MeasuredNetwork, links_from_measurements, measure_network, merge_network, probe_pairs
from lakh.c3.selection import choose_all_reduce
from lakh.c3.topology import Link, Topology, read_topology

RACKS = Topology(tuple((f"h{rank // 2}", f"r{rank // 4}", "") for rank in range(8)))


def test_all_hosts_of_two_racks_measure_the_trunk_together() -> None:
    assert probe_pairs(RACKS) == {"host": [(0, 2)], "rack": [(0, 4), (2, 6)]}


def test_one_host_has_no_links() -> None:
    assert probe_pairs(Topology((("h", "", ""),) * 3)) == {}


def test_a_zone_is_measured_between_different_zones() -> None:
    zones = Topology((("a", "r", "z0"), ("b", "r", "z1")))
    assert probe_pairs(zones) == {"zone": [(0, 1)]}


def test_the_latency_of_an_outer_tier_excludes_the_inner_ones() -> None:
    links = links_from_measurements({"host": 30.0, "rack": 100.0}, {"host": 1e9, "rack": 2e9})
    assert links == {"host": Link(1e9, 30.0), "rack": Link(2e9, 70.0)}
    assert links_from_measurements({"host": 30.0, "rack": 20.0}, {"host": 1e9, "rack": 2e9})["rack"].delay_us == 0.0


def test_measured_links_decide_the_algorithm() -> None:
    far = Topology(tuple((f"h{rank}", "", "") for rank in range(8)))
    slow = choose_all_reduce(far, 1000, 4, links={"host": Link(1e9, 10_000.0)})
    assert slow.algorithm == "flat"  # two stages of latency instead of six or fourteen
    assert slow.seconds > 0.02


FOUR = Topology(tuple((f"h{rank}", "", "") for rank in range(4)), {"host": Link(50e6)})


def test_a_measured_slow_host_gets_a_smaller_part() -> None:
    known, links = merge_network(FOUR, MeasuredNetwork({}, {"//h1": 12.5e6, "//elsewhere": 1.0}))
    choice = choose_all_reduce(known, 2_000_000, 4, links=links)
    assert choice.rates == (50e6, 12.5e6, 50e6, 50e6)
    assert "h1 12.5 MB/s (measured), other hosts 50 MB/s" in choice.reason
    assert merge_network(known, MeasuredNetwork({}, {}))[0] == FOUR  # a new measurement found it as fast as the others


def test_rates_in_a_file_take_precedence() -> None:
    given = Topology(FOUR.places, FOUR.links, {"//h1": 40e6})
    known, _ = merge_network(given, MeasuredNetwork({}, {"//h1": 12.5e6, "//h2": 10e6}))
    assert known.host_rates == {"//h1": 40e6, "//h2": 10e6}
    assert "h1 40 MB/s (file), h2 10 MB/s (measured)" in choose_all_reduce(known, 2_000_000, 4).reason


def test_places_can_be_written_without_links(tmp_path: Path) -> None:
    file = tmp_path / "places.toml"
    file.write_text(to_toml(RACKS, links=False))
    given = read_topology(file, 8)
    assert (given.places, given.links, given.host_rates) == (RACKS.places, {}, {})


@pytest.mark.timeout(200)
@pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++")
def test_all_ranks_get_the_same_figures_and_the_next_start_reads_them(tmp_path: Path) -> None:
    def start() -> list[dict[str, Link]]:
        store, found = HashStore(), [dict[str, Link]()] * 3

        def one(rank: int) -> None:
            group = CommGroup.join(store, rank, 3, timeout_s=60.0, place=(f"h{rank}", "", ""))
            found[rank] = measure_network(group, cache=str(tmp_path)).links
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
