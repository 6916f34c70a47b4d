"""Seconds that links between sites add to a step.

A pipeline boundary between two sites delays every result by the latency of the link and by its own transfer
(pipeline_forms.py says what schedules make of it).

Gradients between groups travel round a ring of the groups: hierarchical reduction sends 2 (S-1)/S of the model over a
link, a flat ring over all R replicas 2 (R-1)/R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lakh.planner.across.layout_rows import LayoutRows
from lakh.planner.across.network import NetworkOption, link_Bps, resend_s
from lakh.planner.across.placements import PipelineGroup, SitePlacement
from lakh.planner.across.sites import SiteNetwork
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["CODEC_RATIO", "Crossing", "SyncOption"]

CODEC_RATIO = {"none": 1.0, "bf16": 0.5, "int8": 0.25 + 1 / 64, "int4": 0.125 + 1 / 64}
"""Bytes over float32, of c3's codecs between the outermost groups; scales of blocks included."""
GRADIENT_BYTES = 4.0
MESSAGE_BYTES = 64 * 2.0**20
"""Of a gradient bucket between sites: what a lost packet delays."""


@dataclass(frozen=True)
class SyncOption:
    """How gradients are reduced between sites."""

    hierarchical: bool = True
    overlap: bool = True
    codec: str = "none"
    """Other codecs change the numbers that are added."""
    local_steps: int = 1
    """Steps between two reductions across sites; more than 1 is another optimizer (local SGD, DiLoCo)."""

    def is_beaten_by(self, others: Sequence[SyncOption]) -> bool:
        """Whether another one overlaps and reduces hierarchically where this one does not, and is else the same: it
        sends no more bytes and exposes no more of them."""
        if self.hierarchical and self.overlap:
            return False
        return replace(self, hierarchical=True, overlap=True) in others

    @property
    def flag(self) -> str | None:
        """Why a step with this option does not compute what plain training computes."""
        if self.local_steps > 1:
            return f"not equivalent: sites synchronise every {self.local_steps} steps (local SGD, DiLoCo)"
        return None if self.codec == "none" else f"numerical change: {self.codec} gradients between sites"


@dataclass(frozen=True)
class Crossing:
    """Traffic of one model between sites, over one network option."""

    network: SiteNetwork
    model: Model
    sequence: int
    option: NetworkOption
    balance: dict[int, float] = field(default_factory=dict)
    """Link -> simulated share of its bandwidth that the slowest flows leave in use; else estimated."""

    def stream_bytes(self, rows: LayoutRows) -> Array:
        """Activations of one micro-batch on one context rank, between two stages."""
        return rows.micro_batch * self.sequence / rows.cp * self.model.width * 2.0

    def path_Bps(self, a: int, b: int, flows: Array) -> Array:
        """What `flows` pairs of GPUs get between two sites together."""
        nic = min(self.network.nic_Bps[a], self.network.nic_Bps[b])
        rates = [self._link_Bps(link, flows, nic) for link in self.network.paths[a, b]]
        return np.minimum.reduce(rates)

    def _link_Bps(self, link: int, flows: Array, nic_Bps: float) -> Array:
        network = self.network
        one, capacity = network.links[link], float(network.capacity_Bps[link])
        return link_Bps(one, capacity, self.option, flows, nic_Bps, self.balance.get(link))

    def message_s(self, a: int, b: int, size_bytes: Array) -> Array:
        """Latency of a message between two sites, without its transfer."""
        again = sum(resend_s(self.network.links[link], self.option, size_bytes) for link in self.network.paths[a, b])
        return self.network.delay_s[a, b] + again

    def boundaries(self, group: PipelineGroup, rows: LayoutRows, replicas: Array) -> list[tuple[int, Array]]:
        """Boundaries between sites: stages before it, seconds that a result needs."""
        found, before = [], 0
        flows = replicas * rows.rank_gpus
        size = self.stream_bytes(rows) / rows.tp
        for a, b, stages in zip(group.sites, group.sites[1:], group.stages, strict=False):
            before += stages
            transfer = size * flows / self.path_Bps(a, b, flows)
            found.append((before, self.message_s(a, b, size) + transfer))
        return found

    def pace_s(self, group: PipelineGroup, rows: LayoutRows, replicas: Array) -> Array:
        """Least seconds of a micro-batch that the links allow: every chunk crosses each boundary in both directions,
        and returns from the last site to the first between two chunks."""
        flows = replicas * rows.rank_gpus
        size = self.stream_bytes(rows) * replicas * rows.cp
        pace = 0.0 * size
        for a, b in zip(group.sites, group.sites[1:], strict=False):
            pace = np.maximum(pace, size * (2 * rows.chunks - 1) / self.path_Bps(a, b, flows))
        return pace

    def gradient_s(self, placement: SitePlacement, rows: LayoutRows, replicas: list[Array], sync: SyncOption) -> Array:
        """Reduction of the gradients between groups, of one step."""
        groups = placement.groups
        if len(groups) == 1:
            return 0.0 * rows.tp
        model_bytes = self.model.parameters * GRADIENT_BYTES * CODEC_RATIO[sync.codec]
        members = float(len(groups)) if sync.hierarchical else sum(replicas)
        sent = 2 * (members - 1) / members * model_bytes
        latency, loads = 0.0, dict[tuple[int, bool], Array]()
        for (number, a, b), stages in placement.replica_pairs.items():
            flows = np.minimum(replicas[number], replicas[(number + 1) % len(groups)]) * rows.rank_gpus * stages
            nic = min(self.network.nic_Bps[a], self.network.nic_Bps[b])
            for link in self.network.directed(a, b):
                seconds = sent * stages / rows.stages / self._link_Bps(link[0], flows, nic)
                loads[link] = loads.get(link, 0.0) + seconds
            latency = max(latency, float(np.max(self.message_s(a, b, MESSAGE_BYTES))))
        total: Array = np.maximum.reduce(list(loads.values())) + 2 * (len(groups) - 1) * latency
        return total / sync.local_steps
