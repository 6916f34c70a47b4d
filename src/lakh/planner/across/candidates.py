"""Candidates of the search: one placement, layout, network and reduction, with the step that follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lakh.planner.across.crossing import SyncOption
from lakh.planner.across.layout_rows import LayoutRows
from lakh.planner.across.network import NetworkOption
from lakh.planner.across.placement_work import StepParts
from lakh.planner.across.placements import SitePlacement
from lakh.planner.across.sites import SiteNetwork

__all__ = ["SiteCandidate"]


@dataclass(frozen=True)
class SiteCandidate:
    placement: SitePlacement
    layout: LayoutRows
    """A single row."""
    network: NetworkOption
    sync: SyncOption
    step: StepParts
    usd_per_step: float
    gpus: int
    replicas: tuple[int, ...]
    """Of each group."""
    micro_batches: tuple[int, ...]
    """Of each replica of a group."""
    fidelity: str = "analytic"
    """analytic, timeline or fabric: the most exact model that its time comes from."""

    @property
    def step_s(self) -> float:
        return float(self.step.total_s)

    @property
    def rank(self) -> tuple[float, float]:
        return self.step_s, self.usd_per_step

    def timed(self, step: StepParts, fidelity: str) -> SiteCandidate:
        """The same at another fidelity; its price follows the time."""
        usd = self.usd_per_step * float(step.total_s) / self.step_s
        return replace(self, step=step, usd_per_step=usd, fidelity=fidelity)

    def as_dict(self, network: SiteNetwork) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "usd_per_step": self.usd_per_step,
            "gpus": self.gpus,
            "placement": self.placement.text(network.names),
            "groups": [
                {network.names[site]: stages for site, stages in zip(group.sites, group.stages, strict=True)}
                for group in self.placement.groups
            ],
            "crossing": self.placement.crossing,
            **self.layout.describe(0),
            "replicas": list(self.replicas),
            "micro_batches": list(self.micro_batches),
            "hierarchical": self.sync.hierarchical,
            "overlap": self.sync.overlap,
            "codec": self.sync.codec,
            "local_steps": self.sync.local_steps,
            "flag": self.sync.flag,
            "routing": self.network.routing,
            "qps": self.network.qps,
            "transport": self.network.transport,
            "extra_wavelengths": self.network.wavelengths,
            "parts_s": {name.removesuffix("_s"): float(value) for name, value in vars(self.step).items()},
            "fidelity": self.fidelity,
        }
