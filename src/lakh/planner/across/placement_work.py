"""One placement with all its layouts: what sites compute, and the step that follows for a network and a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lakh.planner.across.crossing import Crossing, SyncOption
from lakh.planner.across.layout_rows import DEEP, ZB_H2, LayoutRows
from lakh.planner.across.pipeline_forms import boundary_wait_s
from lakh.planner.across.placements import SitePlacement
from lakh.planner.across.site_work import SiteTimes, SiteWork
from lakh.planner.across.sites import SECONDS_PER_MONTH, SiteNetwork
from lakh.planner.stacked import Array

__all__ = ["PlacementWork", "SiteWorks", "StepParts"]

SiteWorks = dict[int, SiteWork]
"""Of each site."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step, by what they are spent on."""

    busy_s: Array
    """Inside the sites, on the slowest group, without data-parallel traffic."""
    waits_s: Array
    """Pipelines waiting for links between sites."""
    gradients_s: Array
    """Exposed reduction of gradients, inside and between sites."""

    @property
    def total_s(self) -> Array:
        return self.busy_s + self.waits_s + self.gradients_s


class PlacementWork:
    """All layouts of one depth in one placement. `slowest` is the crossing with the longest delays that the search
    considers: warm-ups are as deep as it needs."""

    def __init__(
        self, works: SiteWorks, layer_s: dict[int, Array], placement: SitePlacement, rows: LayoutRows, batch: int,
        slowest: Crossing,
    ) -> None:  # fmt: skip
        self.works, self.placement, self.rows, self.batch = works, placement, rows, batch
        self.network: SiteNetwork = slowest.network
        first = next(iter(works.values()))
        self.layers = [self._stage_layers(layer_s, number) for number in range(len(placement.groups))]
        self.replicas, self.micro_batches = self._split_batch(layer_s)
        self.is_possible = np.minimum.reduce(self.replicas) >= 1
        self.times: list[list[SiteTimes]] = []
        seen: dict[object, SiteTimes] = {}  # groups of one site of the same kind and size do the same
        for number, group in enumerate(placement.groups):
            replicas, count = np.maximum(self.replicas[number], 1.0), self.micro_batches[number]
            stage = np.maximum.reduce([self.layers[number][i] * layer_s[s] for i, s in enumerate(group.sites)])
            delays = slowest.boundaries(group, rows, replicas)
            warm_up = np.ceil(2 * sum((delay for _, delay in delays), 0.0 * stage) / stage)
            warm_up = np.where(rows.kind == DEEP, warm_up, np.where(rows.kind == ZB_H2, rows.stages - 1.0, 0.0))
            plan = rows.plan(first.model, first.sequence, replicas, count, np.minimum(warm_up, count))
            here = []
            for i, site in enumerate(group.sites):
                alone = len(group.sites) == 1
                key = (id(works[site]), self.network.gpus[site] if alone else (number, id(layer_s[site])))
                if key not in seen:
                    seen[key] = works[site].times(rows, plan, layer_s[site], self.layers[number][i])
                here.append(seen[key])
            self.times.append(here)
        self.fits = self.is_possible & np.logical_and.reduce([one.fits for group in self.times for one in group])
        self.busy_s = np.maximum.reduce([one.busy_s for group in self.times for one in group])
        self.gpus = [
            {site: self.replicas[g] * rows.rank_gpus * n for site, n in zip(group.sites, group.stages, strict=True)}
            for g, group in enumerate(placement.groups)
        ]

    def _stage_layers(self, layer_s: dict[int, Array], number: int) -> list[Array]:
        """Layers of a stage on each site of a group: more on faster GPUs."""
        group, rows = self.placement.groups[number], self.rows
        total = next(iter(self.works.values())).model.layers
        if len({id(layer_s[site]) for site in group.sites}) == 1:
            return [np.full(rows.count, np.ceil(total / rows.stages))] * len(group.sites)
        speed = sum(n / layer_s[site] for site, n in zip(group.sites, group.stages, strict=True))
        return [np.ceil(total / layer_s[site] / speed) for site in group.sites]

    def _split_batch(self, layer_s: dict[int, Array]) -> tuple[list[Array], list[Array]]:
        """Replicas of each group, and micro-batches of each of its replicas: the groups end at about the same time."""
        rows, groups = self.rows, self.placement.groups
        unit = np.maximum(rows.ep / rows.rank_gpus, 1.0)  # replicas that hold all experts together
        replicas, stage_s = [], []
        for number, group in enumerate(groups):
            rooms = [
                self.network.gpus[s] / (rows.rank_gpus * n) for s, n in zip(group.sites, group.stages, strict=True)
            ]
            replicas.append(np.floor(np.minimum.reduce(rooms) / unit) * unit)
            stage_s.append(np.maximum.reduce([self.layers[number][i] * layer_s[s] for i, s in enumerate(group.sites)]))
        needed = self.batch / rows.micro_batch
        rate = np.maximum(sum(d / t for d, t in zip(replicas, stage_s, strict=True)), 1e-30)
        counts = [np.maximum(np.ceil(needed / rate / t * (1 - 1e-12)), 1.0) for t in stage_s]
        total = sum(d * m for d, m in zip(replicas, counts, strict=True))
        for number, room in enumerate(replicas):  # a micro-batch less where the others suffice
            can = (total - room >= needed) & (counts[number] > 1)
            counts[number], total = counts[number] - can, total - room * can
        share = np.minimum(needed / np.maximum(total, 1e-30), 1.0)
        used = [np.ceil(d * share / unit * (1 - 1e-12)) * unit for d in replicas]
        return used, counts

    def step(self, crossing: Crossing, sync: SyncOption, index: Any = slice(None)) -> StepParts:
        """The step of some rows."""
        rows, replicas = self.rows.take(index), [one[index] for one in self.replicas]
        waits, exposed = [], []
        across = crossing.gradient_s(self.placement, rows, replicas, sync)
        for number, group in enumerate(self.placement.groups):
            stage, count = self.stage_s(number)[index], self.micro_batches[number][index]
            delays = crossing.boundaries(group, rows, replicas[number])
            wait = boundary_wait_s(rows.kind, rows.chunks, rows.stages, count, stage, delays)
            pace = crossing.pace_s(group, rows, replicas[number])
            waits.append(wait + np.maximum(pace - stage, 0.0) * count)
            for site, one in zip(group.sites, self.times[number], strict=True):
                gradients = one.gradients.take(index)
                exposed.append(gradients.exposed_s(sync.overlap, self.works[site].efficiency, across))
        return StepParts(self.busy_s[index], np.maximum.reduce(waits), np.maximum.reduce(exposed))

    def stage_s(self, group: int) -> Array:
        """A micro-batch on the slowest stage of a group."""
        return np.maximum.reduce([one.stage_s for one in self.times[group]])

    def usd_per_step(self, step_s: Array, crossing: Crossing, index: Array | int) -> Array:
        """Price of the GPUs in use, and of the wavelengths that are added to links in use."""
        rate = 0.0
        for group in self.gpus:
            for site, gpus in group.items():
                rate = rate + gpus[index] * self.network.usd_per_gpu_s[site]
        for link in self.links():
            monthly = self.network.links[link].usd_per_wavelength_month * crossing.option.wavelengths
            rate = rate + monthly / SECONDS_PER_MONTH
        return step_s * rate

    def links(self) -> set[int]:
        """Links that the placement uses."""
        sites = self.placement.sites
        return {link for a in sites for b in sites for link in self.network.paths[a, b]}
