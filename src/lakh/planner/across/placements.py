"""Which axis crosses which link: every way to use some of the sites.

A placement is a list of pipeline groups. The pipelines of a group run through its sites in order, with a number of
stages on each; the groups hold replicas of the model and reduce gradients between them. So {A}{B}{C} is data-parallel
across all links, {A B C} is one pipeline through three sites, and {A B}{C} has both. Tensor, context and expert groups
stay inside a site: they communicate several times in every layer, and each time would take a round trip.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from lakh.planner.across.sites import SiteNetwork

__all__ = ["PipelineGroup", "SitePlacement", "placements", "site_orders"]

LEAST_USE = 0.8
"""Of the GPUs of a group: splits of the stages that leave more of them idle are not considered."""
MOST_SPLITS = 12
"""Splits of one group at one depth, the fullest first."""

Order = tuple[int, ...]


@dataclass(frozen=True)
class PipelineGroup:
    sites: Order
    """Numbers of the sites, in the order of the stages."""
    stages: tuple[int, ...]
    """On each of them."""

    @property
    def site_of_stage(self) -> list[int]:
        return [site for site, count in zip(self.sites, self.stages, strict=True) for _ in range(count)]


@dataclass(frozen=True)
class SitePlacement:
    groups: tuple[PipelineGroup, ...]

    @property
    def sites(self) -> tuple[int, ...]:
        return tuple(sorted(site for group in self.groups for site in group.sites))

    @property
    def stages(self) -> int:
        return sum(self.groups[0].stages)

    @property
    def crossing(self) -> str:
        pipelines = any(len(group.sites) > 1 for group in self.groups)
        if len(self.groups) == 1:
            return "pipeline" if pipelines else "none"
        return "data and pipeline" if pipelines else "data"

    @cached_property
    def replica_pairs(self) -> dict[tuple[int, int, int], int]:
        """Gradients between groups: (group, its site, site of the next group) -> stages; both sites differ."""
        found: Counter[tuple[int, int, int]] = Counter()
        for number, group in enumerate(self.groups):
            after = self.groups[(number + 1) % len(self.groups)]
            for a, b in zip(group.site_of_stage, after.site_of_stage, strict=True):
                if a != b:
                    found[number, a, b] += 1
        return dict(found)

    def text(self, names: list[str]) -> str:
        groups = [
            " -> ".join(f"{names[s]} ({n})" if len(group.sites) > 1 else names[s] for s, n in zip(
                group.sites, group.stages, strict=True
            ))
            for group in self.groups
        ]  # fmt: skip
        return " | ".join(groups)


def site_orders(network: SiteNetwork) -> Iterator[tuple[Order, ...]]:
    """Every way to choose connected sites and to arrange them in groups of ordered sites."""
    numbers = range(len(network.names))
    for size in range(1, len(network.names) + 1):
        for chosen in itertools.combinations(numbers, size):
            if network.connects(chosen):
                for groups in _partitions(chosen):
                    yield from itertools.product(*(_orders(group) for group in groups))


def placements(network: SiteNetwork, orders: tuple[Order, ...], stages: int) -> Iterator[SitePlacement]:
    """The placements of one arrangement with `stages` pipeline stages: all splits that use the sites well."""
    splits = [_splits(tuple(network.gpus[site] for site in order), stages) for order in orders]
    for chosen in itertools.product(*splits):
        groups = (PipelineGroup(order, split) for order, split in zip(orders, chosen, strict=True))
        yield SitePlacement(tuple(groups))


def _partitions(sites: Order) -> Iterator[tuple[Order, ...]]:
    if not sites:
        yield ()
        return
    first, rest = sites[0], sites[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            remaining = tuple(site for site in rest if site not in others)
            for groups in _partitions(remaining):
                yield ((first, *others), *groups)


def _orders(group: Order) -> list[Order]:
    """Orders of a group; a pipeline and its reverse cross the same links."""
    return [order for order in itertools.permutations(group) if order[0] <= order[-1]]


@cache
def _splits(gpus: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """Stages of each site, in the order of the GPUs that are used."""
    if len(gpus) > stages:
        return ()
    used = {}
    for cuts in itertools.combinations(range(1, stages), len(gpus) - 1):
        ends = (0, *cuts, stages)
        split = tuple(b - a for a, b in itertools.pairwise(ends))
        used[split] = min(g / n for g, n in zip(gpus, split, strict=True)) * stages / sum(gpus)
    good = sorted((split for split in used if used[split] >= LEAST_USE), key=lambda split: (-used[split], split))
    return tuple(good[:MOST_SPLITS] or sorted(used, key=lambda split: (-used[split], split))[:1])
