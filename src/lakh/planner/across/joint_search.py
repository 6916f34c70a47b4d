"""Exhaustive search over placements, schedules and networks of one model on several sites.

Every combination is priced by closed forms. A row is skipped only when its time inside the sites alone, or the time of
its layers on all GPUs of these sites without a bubble, exceeds what was already found for the same choice, or when
another option is at least as good in every case (overlapping, reducing inside the sites first, a routing that is better
inside sites and on links). The best few for every choice of sites,
crossing, wavelengths and kind of schedule are then timed again (refine.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lakh.errors import InfeasiblePlan
from lakh.planner.across.candidates import SiteCandidate
from lakh.planner.across.crossing import Crossing, SyncOption
from lakh.planner.across.layout_rows import KINDS, LayoutRows, layout_rows
from lakh.planner.across.network import EVEN_ROUTINGS, SHARED_PATH, NetworkOption, network_options, ring_share
from lakh.planner.across.placement_work import PlacementWork, SiteWorks, StepParts
from lakh.planner.across.placements import SitePlacement, placements, site_orders
from lakh.planner.across.site_work import SiteWork
from lakh.planner.across.sites import SiteNetwork
from lakh.planner.search.candidates import SearchConstraints, stage_counts
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["EQUIVALENT", "JointSearch", "SearchSpace"]

MOST_STAGES = 64
KEPT = 4
"""Candidates that are kept for each choice of sites, crossing, wavelengths and kind of schedule."""
EQUIVALENT = tuple(SyncOption(hierarchical=h, overlap=o) for h, o in itertools.product((True, False), repeat=2))


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The part of all combinations that a search or a baseline considers."""

    networks: Sequence[NetworkOption]
    syncs: Sequence[SyncOption] = EQUIVALENT
    accepts: Callable[[SitePlacement], bool] = lambda placement: True
    rows: Callable[[LayoutRows], Array] = lambda rows: np.ones(rows.count, dtype=bool)


@dataclass
class JointSearch:
    model: Model
    network: SiteNetwork
    batch: int
    sequence: int
    depths: Sequence[int] = ()
    """Numbers of pipeline stages; by default all that the model allows."""
    searched: int = 0
    """Combinations of all searches together."""
    refused: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._works: dict[tuple[str, int], SiteWorks] = {}
        self._layer_s: dict[tuple[str, int, int], dict[int, Array]] = {}
        self._rows: dict[int, LayoutRows] = {}
        limits = SearchConstraints(batch=self.batch, sequence=self.sequence, gpus=(1,), max_pp=MOST_STAGES)
        self.depths = self.depths or stage_counts(self.model, limits)

    @property
    def today(self) -> NetworkOption:
        """The first of each network choice."""
        return network_options(self.network.file.network)[0]

    def best_networks(self) -> list[NetworkOption]:
        """Network options that no other one beats inside every site and on every link at once."""
        options = network_options(self.network.file.network)
        pairs = {(one.routing, one.qps): self._quality(one.routing, one.qps) for one in options}
        good: dict[tuple[str, int], tuple[float, ...]] = {}
        for pair, quality in pairs.items():
            if not any(all(a >= b for a, b in zip(other, quality, strict=True)) for other in good.values()):
                good = {p: q for p, q in good.items() if not all(a <= b for a, b in zip(q, quality, strict=True))}
                good[pair] = quality
        return [one for one in options if (one.routing, one.qps) in good]

    def _quality(self, routing: str, qps: int) -> tuple[float, ...]:
        even = 1e9 if routing in EVEN_ROUTINGS else 1.0 if routing in SHARED_PATH else float(qps)
        return (even, *(ring_share(cluster, routing, qps) for cluster in dict.fromkeys(self.network.clusters)))

    def search(self, space: SearchSpace) -> list[SiteCandidate]:
        """The best candidates for every choice of sites, crossing and wavelengths, by closed forms."""
        kept: dict[object, list[SiteCandidate]] = {}
        for orders in site_orders(self.network):
            for stages in self.depths:
                rows = self._all_rows(stages)
                index = np.flatnonzero(space.rows(rows))
                for placement in placements(self.network, orders, stages) if len(index) else ():
                    if space.accepts(placement):
                        self._search_placement(space, placement, rows.take(index), index, kept)
        return sorted(itertools.chain(*kept.values()), key=lambda one: one.rank)

    def _search_placement(
        self, space: SearchSpace, placement: SitePlacement, rows: LayoutRows, index: Array,
        kept: dict[object, list[SiteCandidate]],
    ) -> None:  # fmt: skip
        syncs = space.syncs if len(placement.groups) > 1 else space.syncs[:1]
        timed = [one for one in syncs if not one.is_beaten_by(syncs)]
        crosses = len(placement.sites) > 1
        by_routing: dict[tuple[str, int], list[NetworkOption]] = {}
        for one in space.networks:
            by_routing.setdefault((one.routing, one.qps), []).append(one)
        for group in by_routing.values():
            options = group if crosses else group[:1]
            self.searched += rows.count * len(options) * len(syncs)
            some = self._worth_timing(placement, rows, options, index, kept)
            if not len(some):
                continue
            work = self.work(placement, rows.take(some), options, index[some])
            self._count("a site has too few GPUs for one replica", int((~work.is_possible).sum()))
            self._count("does not fit in memory", int((work.is_possible & ~work.fits).sum()))
            for wavelengths in sorted({one.wavelengths for one in options}):
                same = [one for one in options if one.wavelengths == wavelengths]
                self._keep_best(work, same, timed, _pools(kept, placement, wavelengths))

    def _worth_timing(
        self, placement: SitePlacement, rows: LayoutRows, options: Sequence[NetworkOption], index: Array,
        kept: dict[object, list[SiteCandidate]],
    ) -> Array:  # fmt: skip
        """Rows whose layers alone, spread evenly over all GPUs, are faster than the candidates of some pool."""
        layer_s = self._depth_layers_s(options[0].routing, options[0].qps, rows.stages)
        fastest = np.minimum.reduce([layer_s[site] for site in placement.sites])[index]
        gpus = sum(self.network.gpus[site] for site in placement.sites)
        least_s = self.batch / rows.micro_batch * self.model.layers * fastest * rows.rank_gpus / gpus
        bounds = np.max([_bounds(_pools(kept, placement, one.wavelengths)) for one in options], axis=0)
        return np.flatnonzero(least_s * (1 - 1e-9) < bounds[rows.kind.astype(int)])

    def _keep_best(
        self, work: PlacementWork, options: Sequence[NetworkOption], syncs: Sequence[SyncOption],
        pools: list[list[SiteCandidate]],
    ) -> None:  # fmt: skip
        """Put the best rows of each kind of schedule into its pool, with the best network option and reduction."""
        kind = work.rows.kind.astype(int)
        bounds = _bounds(pools)
        some = np.flatnonzero(work.fits & (work.busy_s < bounds[kind]))
        if not len(some):
            return
        pairs = [(Crossing(self.network, self.model, self.sequence, o), sync) for o in options for sync in syncs]
        steps = [work.step(crossing, sync, some) for crossing, sync in pairs]
        totals = np.array([step.total_s for step in steps])
        choice = totals.argmin(axis=0)
        total = totals[choice, np.arange(len(some))]
        for number, pool in enumerate(pools):
            mine = np.flatnonzero((kind[some] == number) & (total < bounds[number]))
            _, first = np.unique(total[mine], return_index=True)  # sorted, and once each: many rows tie
            for at in mine[first[:KEPT]]:
                crossing, sync = pairs[choice[at]]
                step = StepParts(*(float(part[at]) for part in vars(steps[choice[at]]).values()))
                pool.append(self._candidate(work, crossing, sync, int(some[at]), step))
            pool.sort(key=lambda one: one.rank)
            del pool[KEPT:]

    def _candidate(
        self, work: PlacementWork, crossing: Crossing, sync: SyncOption, row: int, step: StepParts
    ) -> SiteCandidate:
        usd = work.usd_per_step(step.total_s, crossing, row)
        gpus = sum(int(count[row]) for group in work.gpus for count in group.values())
        return SiteCandidate(
            work.placement, work.rows.take(np.array([row])), crossing.option, sync, step, float(usd), gpus,
            tuple(int(d[row]) for d in work.replicas), tuple(int(m[row]) for m in work.micro_batches),
        )  # fmt: skip

    def _count(self, reason: str, number: int) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + number

    def _all_rows(self, stages: int) -> LayoutRows:
        if stages not in self._rows:
            self._rows[stages] = layout_rows(self.model, self.sequence, self.batch, stages)
        return self._rows[stages]

    def work(
        self, placement: SitePlacement, rows: LayoutRows, options: Sequence[NetworkOption], index: Array | None = None
    ) -> PlacementWork:
        """`index` are the numbers of the rows among all rows of this depth."""
        routing, qps = options[0].routing, options[0].qps
        works = self._site_works(routing, qps)
        if index is None:
            layer_s = self._layers_s(works, rows)
        else:
            of_all = self._depth_layers_s(routing, qps, rows.stages)
            shared = {id(all_s): all_s[index] for all_s in of_all.values()}
            layer_s = {site: shared[id(all_s)] for site, all_s in of_all.items()}
        worst = min(options, key=lambda one: (-(one.transport == "go-back-n"), one.wavelengths))
        slowest = Crossing(self.network, self.model, self.sequence, worst)
        return PlacementWork(works, layer_s, placement, rows, self.batch, slowest)

    def _site_works(self, routing: str, qps: int) -> SiteWorks:
        if (routing, qps) not in self._works:
            by_cluster = {
                cluster: SiteWork(self.model, cluster, self.sequence, ring_share(cluster, routing, qps))
                for cluster in dict.fromkeys(self.network.clusters)
            }
            self._works[routing, qps] = {i: by_cluster[cluster] for i, cluster in enumerate(self.network.clusters)}
        return self._works[routing, qps]

    def _depth_layers_s(self, routing: str, qps: int, stages: int) -> dict[int, Array]:
        """Seconds of a layer on each site, for all rows of a depth."""
        key = (routing, qps, stages)
        if key not in self._layer_s:
            self._layer_s[key] = self._layers_s(self._site_works(routing, qps), self._all_rows(stages))
        return self._layer_s[key]

    def _layers_s(self, works: SiteWorks, rows: LayoutRows) -> dict[int, Array]:
        by_work = {id(work): work.layer_s(rows) for work in works.values()}
        return {site: by_work[id(work)] for site, work in works.items()}

    def best(self, found: Sequence[SiteCandidate], what: str) -> SiteCandidate:
        if found:
            return min(found, key=lambda one: one.rank)
        why = "; ".join(f"{reason}: {number:,}" for reason, number in self.refused.items()) or "nothing divides"
        raise InfeasiblePlan(what, f"has no layout ({why})", "use more GPUs, a smaller model or a shorter sequence")


def _pools(
    kept: dict[object, list[SiteCandidate]], placement: SitePlacement, wavelengths: int
) -> list[list[SiteCandidate]]:  # fmt: skip
    """Candidates of each kind of schedule for one choice of sites, crossing and wavelengths."""
    return [kept.setdefault((placement.sites, placement.crossing, wavelengths, kind), []) for kind in range(len(KINDS))]


def _bounds(pools: Sequence[list[SiteCandidate]]) -> Array:
    """What a new candidate of each pool must beat."""
    return np.array([pool[-1].step_s if len(pool) == KEPT else np.inf for pool in pools])
