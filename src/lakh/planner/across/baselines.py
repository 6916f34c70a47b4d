"""What the joint optimum is compared with: today's configuration, and the best of one dimension alone.

production         replicas on every site (HSDP), interleaved 1F1B, a flat ring, today's network; layout tuned
crosspipe          one pipeline through all sites, the best schedule for its delays, today's network
placement only     the best placement, with production's schedule and network
schedule only      the best schedule, with production's placement and network
network only       the best network, with production's placement and schedule
single dimension   the best of the last three
"""

from __future__ import annotations

import numpy as np

from lakh.planner.across.candidates import SiteCandidate
from lakh.planner.across.crossing import SyncOption
from lakh.planner.across.joint_search import EQUIVALENT, JointSearch, SearchSpace
from lakh.planner.across.layout_rows import INTERLEAVED, LayoutRows
from lakh.planner.across.network import network_options
from lakh.planner.across.placements import SitePlacement
from lakh.planner.stacked import Array

__all__ = ["DIMENSIONS", "baseline_spaces", "production_space"]

DIMENSIONS = ("placement only", "schedule only", "network only")
PRODUCTION_SYNC = SyncOption(hierarchical=False)


def production_space(search: JointSearch) -> SearchSpace:
    """Replicas on every site; with one site, the best layout of it."""
    count = len(search.network.names)
    return SearchSpace(
        networks=[search.today],
        syncs=[PRODUCTION_SYNC],
        accepts=lambda placement: len(placement.groups) == count,
        rows=_interleaved,
    )


def _interleaved(rows: LayoutRows) -> Array:
    return (rows.kind == INTERLEAVED) | (rows.stages == 1)


def baseline_spaces(search: JointSearch, production: SiteCandidate) -> dict[str, SearchSpace]:
    """The other baselines; some need what production chose."""
    layout, sites = production.layout, set(range(len(search.network.names)))

    def same(rows: LayoutRows, *names: str) -> Array:
        equal = [getattr(rows, name) == getattr(layout, name)[0] for name in names]
        return np.logical_and.reduce(equal)

    def is_production(placement: SitePlacement) -> bool:
        return placement == production.placement

    return {
        "crosspipe": SearchSpace(
            networks=[search.today],
            syncs=EQUIVALENT[:1],
            accepts=lambda placement: len(placement.groups) == 1 and set(placement.sites) == sites,
        ),
        "placement only": SearchSpace(
            networks=[search.today],
            syncs=[PRODUCTION_SYNC],
            rows=lambda rows: _interleaved(rows) & same(rows, "micro_batch", "recompute"),
        ),
        "schedule only": SearchSpace(
            networks=[search.today],
            accepts=is_production,
            rows=lambda rows: same(rows, "tp", "cp", "ep", "zero"),
        ),
        "network only": SearchSpace(
            networks=network_options(search.network.file.network),
            syncs=[PRODUCTION_SYNC],
            accepts=is_production,
            rows=lambda rows: same(rows, "tp", "cp", "ep", "zero", "micro_batch", "recompute", "kind", "chunks"),
        ),
    }
