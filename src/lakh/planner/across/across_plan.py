"""The best way to train one model across sites: joint optimum, baselines, gains, and the price of time.

Every number is simulated. Gains are shares of the baseline's step that the joint optimum saves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lakh.planner.across.baselines import DIMENSIONS, baseline_spaces, production_space
from lakh.planner.across.candidates import SiteCandidate
from lakh.planner.across.crossing import SyncOption
from lakh.planner.across.joint_search import JointSearch, SearchSpace
from lakh.planner.across.refine import Refinement
from lakh.planner.across.sites import SiteNetwork, Sites
from lakh.spec.model import Model

__all__ = ["AcrossPlan", "plan_across"]

WORTH_TIMELINE = 1.2
"""Times the fastest: candidates whose closed forms are slower go through no timeline, unless they are the best that
their sites, crossing and wavelengths allow."""
FABRIC_FINALISTS = 12
BASELINE_FINALISTS = 3
FLAGGED_CANDIDATES = 16
CODECS = ("bf16", "int8", "int4")
LOCAL_STEPS = (10, 100)


@dataclass(frozen=True)
class AcrossPlan:
    best: dict[str, Any]
    best_as_built: dict[str, Any]
    """The best without additional wavelengths."""
    baselines: dict[str, dict[str, Any]]
    gain: dict[str, float]
    """Baseline -> share of its step that the best saves."""
    gain_as_built: dict[str, float]
    """The same without additional wavelengths; below 0 where a baseline has some."""
    why: str
    flagged: list[dict[str, Any]]
    """The best that changes what is computed: codecs between sites, local steps."""
    pareto: list[dict[str, Any]]
    """Of seconds and US dollars per step, fastest first."""
    searched: int
    refused: dict[str, int]
    seconds: float
    notes: list[str] = field(default_factory=list)


def plan_across(
    model: Model, sites: Sites, *, batch: int, sequence: int, prices: str | None = None, depths: Sequence[int] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> AcrossPlan:  # fmt: skip
    """Search everything; `depths` limits the numbers of pipeline stages."""
    began = time.perf_counter()
    network = SiteNetwork(sites, prices)
    search = JointSearch(model, network, batch, sequence, depths)
    refine = Refinement(search)
    progress("routing inside the sites")
    networks = search.best_networks()
    progress("baselines")
    found = {"production": _timed(refine, search.search(production_space(search)))}
    production = search.best(found["production"], "the production default")
    for name, space in baseline_spaces(search, production).items():
        found[name] = _timed(refine, search.search(space))
    progress("placements, schedules and networks together")
    joint = search.search(SearchSpace(networks=networks))
    progress("timelines")
    everything = [*_timed(refine, joint), *(one for pool in found.values() for one in pool)]
    progress("fabric")
    front = _pareto(everything)
    contenders = {name: sorted(pool, key=_rank)[:BASELINE_FINALISTS] for name, pool in found.items() if pool}
    for name in DIMENSIONS:
        contenders.setdefault(name, []).append(production)  # which every single dimension contains
    fastest = sorted(everything, key=_rank)
    fastest_as_built = [one for one in fastest if not one.network.wavelengths]
    few = [
        *fastest[:FABRIC_FINALISTS],
        *fastest_as_built[:FABRIC_FINALISTS],
        *front,
        *itertools.chain(*contenders.values()),
    ]
    finalists = {id(one): one for one in few}
    simulated = {key: refine.fabric(one) for key, one in finalists.items()}
    best = min(simulated.values(), key=_rank)
    as_built = min((one for one in simulated.values() if not one.network.wavelengths), key=_rank)
    baselines = {name: min((simulated[id(one)] for one in few), key=_rank) for name, few in contenders.items()}
    baselines["single dimension"] = min((baselines[name] for name in DIMENSIONS), key=_rank)
    flagged = _flagged(refine, joint, best)
    return AcrossPlan(
        best=best.as_dict(network),
        best_as_built=as_built.as_dict(network),
        baselines={name: one.as_dict(network) for name, one in baselines.items()},
        gain={name: 1 - best.step_s / one.step_s for name, one in baselines.items()},
        gain_as_built={name: 1 - as_built.step_s / one.step_s for name, one in baselines.items()},
        why=_why(best, baselines["production"]),
        flagged=[one.as_dict(network) for one in flagged],
        pareto=[one.as_dict(network) for one in _pareto(list(simulated.values()))],
        searched=search.searched,
        refused={reason: number for reason, number in search.refused.items() if number},
        seconds=time.perf_counter() - began,
        notes=_notes(search, best),
    )


def _rank(one: SiteCandidate) -> tuple[float, float]:
    return one.rank


def _timed(refine: Refinement, found: Sequence[SiteCandidate]) -> list[SiteCandidate]:
    """Candidates through timelines: all near the fastest, and the best of each choice of sites and wavelengths."""
    if not found:
        return []
    limit = found[0].step_s * WORTH_TIMELINE
    firsts: dict[object, SiteCandidate] = {}
    for one in found:
        firsts.setdefault((one.placement.sites, one.placement.crossing, one.network.wavelengths), one)
    chosen = {id(one): one for one in [*firsts.values(), *(one for one in found if one.step_s <= limit)]}
    return [refine.timeline(one) for one in chosen.values()]


def _pareto(found: Sequence[SiteCandidate], most: int = 12) -> list[SiteCandidate]:
    """What nothing beats in time and price at once; fastest first."""
    front: list[SiteCandidate] = []
    for one in sorted(found, key=_rank):
        if not front or one.usd_per_step < front[-1].usd_per_step * (1 - 1e-9):
            front.append(one)
    if len(front) > most:
        front = [front[round(k * (len(front) - 1) / (most - 1))] for k in range(most)]
    return front


def _flagged(refine: Refinement, found: Sequence[SiteCandidate], best: SiteCandidate) -> list[SiteCandidate]:
    """The best with each codec and each number of local steps, where it is faster than the best without. Candidates are
    those with the least time inside their sites: what these options leave."""
    replicated = [one for one in found if len(one.placement.groups) > 1]
    few = sorted(replicated, key=lambda one: (one.step.busy_s, one.rank))[:FLAGGED_CANDIDATES]
    flagged = []
    for sync in [SyncOption(codec=codec) for codec in CODECS] + [SyncOption(local_steps=n) for n in LOCAL_STEPS]:
        timed = [refine.timeline(replace(one, sync=sync)) for one in few]
        if timed and min(timed, key=_rank).step_s < best.step_s * (1 - 1e-6):
            flagged.append(refine.fabric(min(timed, key=_rank)))
    return flagged


def _why(best: SiteCandidate, production: SiteCandidate) -> str:
    """Where the time of the production default goes that the best does not spend."""
    names = {"busy_s": "computation and bubbles inside the sites", "waits_s": "pipelines waiting for links",
             "gradients_s": "exposed gradient reduction"}  # fmt: skip
    saved = {text: float(getattr(production.step, name) - getattr(best.step, name)) for name, text in names.items()}
    parts = [
        f"{text} {-s:+.3g} s" for text, s in sorted(saved.items(), key=lambda item: -abs(item[1])) if abs(s) > 1e-4
    ]
    if not parts:
        return "the production default is the best"
    changes = [f"{best.placement.crossing} parallelism crosses the links"] if best.placement.crossing != "none" else []
    if best.sync.hierarchical and len(best.placement.groups) > 1:
        changes.append("each site reduces before it sends")
    if best.network.routing != production.network.routing:
        changes.append(f"{best.network.routing} routing instead of {production.network.routing}")
    if best.network.wavelengths:
        changes.append(f"{best.network.wavelengths} more wavelengths per link")
    return f"{', '.join(parts)} against the production default: {', '.join(changes)}"


def _notes(search: JointSearch, best: SiteCandidate) -> list[str]:
    notes = ["simulated; tensor, context and expert groups stay inside a site"]
    if len({(m, d) for m, d in zip(best.micro_batches, best.replicas, strict=True)}) > 1:
        notes.append("groups of sites have different numbers of replicas or micro-batches: weight gradients by tokens")
    unused = [name for i, name in enumerate(search.network.names) if i not in best.placement.sites]
    if unused:
        notes.append(f"not used: {', '.join(unused)}")
    return notes
