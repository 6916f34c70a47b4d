"""Training across sites: closed forms against timelines and `estimate`, and the laws of the joint search."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lakh.errors import ConfigError, DataError, InfeasiblePlan, UserError
from lakh.planner.across.across_plan import AcrossPlan, plan_across
from lakh.planner.across.crossing import Crossing, SyncOption
from lakh.planner.across.joint_search import EQUIVALENT, JointSearch, SearchSpace
from lakh.planner.across.layout_rows import INTERLEAVED, KINDS, ONE_F_ONE_B, layout_rows
from lakh.planner.across.network import NetworkOption, link_Bps, resend_s
from lakh.planner.across.pipeline_forms import boundary_wait_s, bubble_stages
from lakh.planner.across.placements import PipelineGroup, SitePlacement, placements, site_orders
from lakh.planner.across.refine import pipeline_s
from lakh.planner.across.sites import NetworkChoices, Site, SiteLink, SiteNetwork, Sites, load_sites
from lakh.planner.across.study import StudyCells, StudyGrid, study_links, with_links
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.plots import gain_map
from lakh.planner.schedules.timeline import OperationSeconds
from lakh.planner.timing.step_time import step_time
from lakh.spec.cluster import load_cluster

pytestmark = pytest.mark.slow  # numba compiles for some seconds on a machine that has no cache yet

MODEL = load_model("llama3-8b")
THIRDS = OperationSeconds(forward=1 / 3, input=1 / 3, weight=1 / 3)
QUIET = NetworkChoices(routing=("te",), qps=(1,), transport=("selective-repeat",))
DEPTHS = (1, 4, 8)
Json = Callable[[str], dict[str, Any]]
Lakh = Callable[..., tuple[int, str, str]]


def some_sites(count: int = 3, gpus: int = 256, network: NetworkChoices = QUIET, **link: Any) -> Sites:
    names = [f"s{i}" for i in range(count)]
    settings: dict[str, Any] = {"distance_km": 100.0, "bandwidth_Tbps": 1.6} | link
    return Sites(
        name="made",
        sites=tuple(Site(name=name, cluster="llama3-24k-roce", gpus=gpus) for name in names),
        links=tuple(SiteLink(between=pair, **settings) for pair in itertools.combinations(names, 2)),
        network=network,
    )


def across(sites: Sites, batch: int = 1024) -> AcrossPlan:
    return plan_across(MODEL, sites, batch=batch, sequence=4096, depths=DEPTHS)


def searcher(sites: Sites, batch: int = 1024) -> JointSearch:
    return JointSearch(MODEL, SiteNetwork(sites), batch, 4096, DEPTHS)


# --- closed forms ---


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize(("p", "m"), [(4, 2), (4, 8), (8, 8), (8, 48), (16, 32)])
@pytest.mark.parametrize("delay", [0.0, 0.1, 2.0])
def test_closed_forms_are_near_timelines(kind: int, p: int, m: int, delay: float) -> None:
    chunks = 2 if kind == INTERLEAVED else 1
    slow = [(p // 2, delay)] if delay else []
    exact = pipeline_s(kind, chunks, p, m, THIRDS, slow)
    one, many = np.array([float(kind)]), np.array([float(m)])
    form = m + bubble_stages(one, np.array([chunks * 1.0]), p, many)[0]
    waits = boundary_wait_s(one, np.array([chunks * 1.0]), p, many, np.ones(1), [(b, np.array([d])) for b, d in slow])
    assert form + waits[0] == pytest.approx(exact, rel=0.1 if kind > 2 else 1e-9)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_long_timelines_are_extended(kind: int) -> None:
    chunks = 2 if kind == INTERLEAVED else 1
    long = pipeline_s(kind, chunks, 4, 40, THIRDS, [(2, 0.4)])
    assert long == pytest.approx(pipeline_s(kind, chunks, 4, 40, THIRDS, [(2, 0.4)], rounds=20), rel=0.02)


def test_one_site_takes_the_time_of_estimate() -> None:
    """Without a link the search uses the model of `lakh plan estimate`."""
    search = searcher(some_sites(1))
    rows = layout_rows(MODEL, 4096, 1024, 4)
    rows = rows.take(np.flatnonzero((rows.kind == ONE_F_ONE_B) & (rows.zero == 1)))
    placement = SitePlacement((PipelineGroup((0,), (4,)),))
    work = search.work(placement, rows, [search.today])
    crossing = Crossing(search.network, MODEL, 4096, search.today)
    found = work.step(crossing, SyncOption()).total_s
    efficiency = calibration_for("H100")[0].efficiency
    cluster = load_cluster("llama3-24k-roce")
    for row in range(0, rows.count, 7):
        plan = ExecutionPlan.of(
            gpus=work.replicas[0][row] * rows.rank_gpus[row] * 4, sequence=4096, tp=rows.tp[row], pp=4, cp=rows.cp[row],
            batch=work.replicas[0][row] * work.micro_batches[0][row] * rows.micro_batch[row], zero=1, tensor_overlap=1,
            micro_batch=rows.micro_batch[row], recompute=rows.recompute[row], gradient_bytes=4,
            sequence_parallel=rows.tp[row] > 1,
        )  # fmt: skip
        assert found[row] == pytest.approx(float(step_time(MODEL, plan, cluster, efficiency).total_s), rel=0.03)


# --- placements and network ---


def test_all_arrangements_of_three_sites() -> None:
    orders = list(site_orders(SiteNetwork(some_sites(3))))
    full = [one for one in orders if sum(map(len, one)) == 3]
    assert len(orders) == 3 + 3 * 2 + 7
    assert (
        len(full) == 1 + 3 + 3
    )  # data; one pipeline of two sites and a replica; one pipeline of three, in three orders


def test_splits_follow_the_sizes_of_the_sites() -> None:
    sites = some_sites(2)
    uneven = replace(sites, sites=(replace(sites.sites[0], gpus=768), sites.sites[1]))
    network = SiteNetwork(uneven)
    best = next(placements(network, ((0, 1),), 8))
    assert best.groups[0].stages == (6, 2)
    assert list(placements(network, ((0, 1),), 1)) == []


def test_sites_without_a_link_are_reached_through_others() -> None:
    sites = some_sites(3)
    chain = replace(sites, links=sites.links[:1] + sites.links[2:])  # s0-s1, s1-s2
    network = SiteNetwork(chain)
    assert network.paths[0, 2] == (0, 1)
    assert network.delay_s[0, 2] == pytest.approx(2 * network.delay_s[0, 1])
    assert network.directed(2, 0) == [(1, False), (0, False)]
    apart = SiteNetwork(replace(sites, links=()))
    assert all(sum(map(len, one)) == 1 for one in site_orders(apart))


@pytest.mark.parametrize("routing", ["ecmp", "e-ecmp", "te", "spray"])
def test_more_bandwidth_is_never_slower(routing: str) -> None:
    rates = []
    for tbps in np.geomspace(0.1, 400, 40):
        link = SiteLink(between=("a", "b"), distance_km=100, bandwidth_Tbps=tbps, loss=1e-5)
        option = NetworkOption(routing, 4, "go-back-n")
        rates.append(float(link_Bps(link, tbps * 1e12 / 8, option, 512.0, 50e9)))
    assert rates == sorted(rates)
    assert rates[-1] <= 512 * 50e9 * (1 + 1e-9)


def test_hashes_leave_less_of_a_link_than_engineered_paths() -> None:
    link = SiteLink(between=("a", "b"), distance_km=100, bandwidth_Tbps=25.6)
    rate = {
        (routing, qps): float(link_Bps(link, 3.2e12, NetworkOption(routing, qps, "selective-repeat"), 1024.0, 50e9))
        for routing, qps in itertools.product(("ecmp", "e-ecmp", "te"), (1, 16))
    }
    assert rate["ecmp", 1] == rate["ecmp", 16] == rate["e-ecmp", 1] < rate["e-ecmp", 16] < rate["te", 1]
    assert rate["te", 1] == pytest.approx(3.2e12)


def test_lost_packets_cost_round_trips_unless_they_are_coded() -> None:
    link = SiteLink(between=("a", "b"), distance_km=1000, bandwidth_Tbps=1.6, loss=1e-4)
    repeat, coded = (float(resend_s(link, NetworkOption("te", 1, t), 2.0**26)) for t in (
        "selective-repeat", "erasure-coding"
    ))  # fmt: skip
    assert 2 * link.delay_s * 0.7 < repeat < 2 * link.delay_s * 2
    assert coded == 0


# --- the laws of the search ---


def test_overlap_and_hierarchical_reduction_are_never_slower() -> None:
    """What lets the search skip the others."""
    search = searcher(some_sites(3))
    rows = layout_rows(MODEL, 4096, 1024, 4)
    placement = next(iter(placements(search.network, ((0,), (1,), (2,)), 4)))
    work = search.work(placement, rows, [search.today])
    crossing = Crossing(search.network, MODEL, 4096, search.today)
    best = work.step(crossing, SyncOption()).total_s
    for sync in EQUIVALENT:
        assert (best <= work.step(crossing, sync).total_s * (1 + 1e-12)).all()
        assert sync.is_beaten_by(EQUIVALENT) == (sync != SyncOption())


@pytest.mark.parametrize("tbps", [0.2, 6.4])
@pytest.mark.parametrize("distance_km", [10.0, 1000.0])
def test_the_joint_optimum_is_never_worse_than_a_baseline(tbps: float, distance_km: float) -> None:
    network = NetworkChoices(routing=("ecmp", "te"), qps=(1,), extra_wavelengths=(0, 8))
    found = across(some_sites(3, network=network, bandwidth_Tbps=tbps, distance_km=distance_km, loss=1e-5))
    assert min(found.gain.values()) >= 0
    single = min(found.baselines[name]["step_s"] for name in ("placement only", "schedule only", "network only"))
    assert found.best["step_s"] <= single == found.baselines["single dimension"]["step_s"]
    steps = [(row["step_s"], row["usd_per_step"]) for row in found.pareto]
    assert steps == sorted(steps)
    assert [usd for _, usd in steps] == sorted((usd for _, usd in steps), reverse=True)
    assert found.best["step_s"] <= found.best_as_built["step_s"]


@pytest.mark.parametrize("tbps", [0.05, 3.2])
def test_another_site_never_makes_it_worse(tbps: float) -> None:
    sites = some_sites(3, bandwidth_Tbps=tbps)
    times = [across(sites.without(*names)).best["step_s"] for names in (("s1", "s2"), ("s2",), ())]
    assert times[0] * (1 + 1e-9) >= times[1] >= times[2] * (1 - 1e-9)


def test_more_bandwidth_never_slows_the_best_step() -> None:
    times = [across(some_sites(3, bandwidth_Tbps=tbps)).best["step_s"] for tbps in (0.05, 0.8, 12.8)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def crossing_s(crossing: str, **change: float) -> float:
    """The best step of two sites where only this axis crosses, with 1f1b."""
    link = {"bandwidth_Tbps": 25.6, "distance_km": 10.0} | change
    search = JointSearch(load_model("llama3-405b"), SiteNetwork(some_sites(2, gpus=2048, **link)), 1024, 8192, (16,))
    space = SearchSpace(
        networks=[search.today],
        accepts=lambda placement: placement.crossing == crossing,
        rows=lambda rows: rows.kind == ONE_F_ONE_B,
    )
    return search.search(space)[0].step_s


def test_a_pipeline_crossing_feels_distance_and_a_data_crossing_bandwidth() -> None:
    base: dict[str, float] = {}
    narrow, far = {"bandwidth_Tbps": 1.6}, {"distance_km": 5000.0}
    pipeline, data = ([crossing_s(axis, **link) for link in (base, narrow, far)] for axis in ("pipeline", "data"))
    assert pipeline[1] < 1.1 * pipeline[0]
    assert data[1] > 1.3 * data[0]
    assert pipeline[2] > 1.08 * pipeline[0]
    assert data[2] < 1.01 * data[0]


def test_faster_gpus_get_more_work() -> None:
    sites = some_sites(2)
    mixed = replace(sites, sites=(sites.sites[0], Site(name="s1", cluster="a100-pod", gpus=256)))
    search = searcher(mixed)
    found = search.search(SearchSpace(networks=[search.today], accepts=lambda p: p.crossing == "data"))[0]
    assert found.micro_batches[0] > found.micro_batches[1]
    work = search.work(found.placement, found.layout, [found.network])
    h100, a100 = (times[0].stage_s[0] for times in work.times)
    assert a100 > 1.5 * h100
    assert found.micro_batches[0] * h100 == pytest.approx(found.micro_batches[1] * a100, rel=0.35)


def test_flagged_options_are_not_the_best() -> None:
    found = across(some_sites(3, bandwidth_Tbps=0.2))
    assert found.best["flag"] is None
    assert (found.best["codec"], found.best["local_steps"]) == ("none", 1)
    for row in found.flagged:
        assert row["step_s"] < found.best["step_s"]
        assert row["flag"].startswith(("numerical change", "not equivalent"))


def test_the_study_varies_every_link(tmp_path: Path) -> None:
    sites = some_sites(2)
    changed = with_links(sites, oversubscription=64.0, distance_km=10.0, loss=0.0)
    assert SiteNetwork(changed).capacity_Bps[0] == pytest.approx(256 * 50e9 / 64)
    grid = StudyGrid(
        models={"small": MODEL}, oversubscriptions=(4.0, 256.0), distances_km=(10.0,), losses=(0.0,), depths=(1, 2, 4)
    )
    asked = {"sites": sites.name, "batch": 512, "sequence": 4096}
    cells = StudyCells(asked, tmp_path / "cells.jsonl")
    told: list[str] = []
    found = study_links(grid, sites, batch=512, sequence=4096, cells=cells, progress=told.append)
    assert ["left" in text for text in told] == [False, True]  # the first cell tells how long the others take
    assert len(found["cells"]) == 2
    assert found["simulated"]
    low, high = (row["gain"]["production"] for row in found["cells"])
    assert 0 <= low <= high == pytest.approx(found["gain"]["production"]["max"])
    picture = tmp_path / "gains.svg"
    gain_map(found["cells"], picture)
    assert "1:256" in picture.read_text(encoding="utf-8")
    assert found["cells"][0]["rtt_ms"] == pytest.approx(2 * (10 * 5e-3 + 0.02))

    # interrupted in the middle of the second cell: only that one is searched again
    file = tmp_path / "cells.jsonl"
    first, second, _ = file.read_text(encoding="utf-8").split("\n")
    file.write_text(f"{first}\n{second[:40]}", encoding="utf-8")
    searched: list[str] = []
    again = study_links(
        grid, sites, batch=512, sequence=4096, cells=StudyCells(asked, file), progress=searched.append
    )  # fmt: skip
    assert len(searched) == 1
    assert "1:256" in searched[0]
    assert again["gain"] == found["gain"]
    assert len(file.read_text(encoding="utf-8").splitlines()) == 2
    with pytest.raises(UserError, match="another study"):
        StudyCells({**asked, "batch": 1}, file)
    file.write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        StudyCells(asked, file)


def test_options_of_a_study_are_refused_without_it(lakh: Lakh) -> None:
    words = ["plan", "across", "three-regions", "--model", "llama3-8b"]
    for more in (["--plot", "a.svg"], ["--cells", "a.jsonl"], ["--model", "llama3-70b"]):
        code, _, told = lakh(*words, *more)
        assert code == 2
        assert "--study" in told


def test_rows_that_are_not_timed_could_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = some_sites(2)

    def found() -> list[tuple[float, str]]:
        search = searcher(sites)
        return [
            (one.step_s, str(one.layout.describe(0))) for one in search.search(SearchSpace(networks=[search.today]))
        ]

    pruned = found()
    monkeypatch.setattr(JointSearch, "_worth_timing", lambda self, placement, rows, *_: np.arange(rows.count))
    assert pruned == found()


# --- input ---


def test_the_shipped_example_has_98k_gpus() -> None:
    network = SiteNetwork(load_sites("three-regions"))
    assert sum(network.gpus) == 98304
    with pytest.raises(UserError, match="three-regions"):
        load_sites("four-regions")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sites": ()}, "0 sites"),
        ({"sites": some_sites(2).sites + some_sites(1).sites}, "two sites of one name"),
        ({"links": (SiteLink(between=("s0", "moon"), distance_km=1, bandwidth_Tbps=1),)}, "not two sites"),
    ],
)
def test_wrong_sites_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(some_sites(2), **change)


def test_wrong_links_are_refused() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        SiteLink(between=("a", "b"), distance_km=1)
    with pytest.raises(ConfigError, match="is not below"):
        SiteLink(between=("a", "b"), distance_km=1, bandwidth_Tbps=1, loss=0.5)
    with pytest.raises(ConfigError, match="is not known"):
        NetworkChoices(routing=("magic",))
    huge = replace(some_sites(1), sites=(Site(name="s0", cluster="llama3-24k-roce", gpus=10**6),))
    with pytest.raises(ConfigError, match="24,576"):
        SiteNetwork(huge)


def test_a_model_that_fits_nowhere_is_infeasible() -> None:
    with pytest.raises(InfeasiblePlan, match="does not fit in memory"):
        plan_across(load_model("llama3-405b"), some_sites(1, gpus=8), batch=8, sequence=4096, depths=(1,))


def test_the_command_prints_the_best_and_its_baselines(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    from lakh import config

    path = tmp_path / "sites.toml"
    path.write_text(config.to_toml(some_sites(2, gpus=64)))
    words = ["plan", "across", str(path), "--model", "llama3-8b", "--batch", "128", "--sequence", "4096"]
    code, out, _ = lakh(*words, "--json")
    assert code == 0
    data = last_line(out)
    assert {"best", "baselines", "gain", "searched", "seconds", "pareto"} <= set(data)
    assert set(data["baselines"]) >= {"production", "crosspipe", "single dimension"}
    assert asdict(load_sites(path)) == asdict(some_sites(2, gpus=64))
    code, out, _ = lakh(*words)
    assert code == 0
    assert "shorter than the production default" in " ".join(out.split())
