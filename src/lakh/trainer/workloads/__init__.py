"""What the training loop asks of a workload: its data, model, optimizer, state and evaluation.

code.py         code language models (lakh.workloads.code)
preference.py   the same on pairs of answers (DPO)
dlrm.py         recommendation models (lakh.workloads.dlrm)

The loop, the launcher, recovery, checkpoints and events are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lakh.checkpoint.slices import TensorSlice
    from lakh.spec import Data, Mesh, Run
    from lakh.tokens.loading.digest import StreamDigest
    from lakh.tokens.loading.prefetch import BatchRequest, Prefetcher
    from lakh.tokens.loading.skips import SkipRanges
    from lakh.trainer.launch.world import World
    from lakh.trainer.observability.event_writer import EventWriter
    from lakh.trainer.step import Pass

__all__ = ["BatchStream", "DataSource", "HeldoutResult", "TrainingBatch", "Workload", "open_workload"]


class TrainingBatch(Protocol):
    """What one forward and backward pass reads."""

    @property
    def device(self) -> torch.device: ...

    def scale(self, micro_batches: int) -> float:
        """The factor of the sum of its losses, as one of a rank's micro-batches of a step."""
        ...


class BatchStream(Protocol):
    """The batches of one rank, from a step on."""

    digest: StreamDigest
    """Of all sequences read so far."""
    fill: float
    """Share of the last step's positions on this rank that have a target."""
    skips: SkipRanges
    prefetcher: Prefetcher[Any]

    @property
    def wait_s(self) -> float:
        """Seconds that the trainer has waited for batches so far."""
        ...

    def micro_batches(self, step: int, device: torch.device) -> list[Any]: ...
    def close(self, *, keep: bool = False) -> None:
        """`keep`: see Prefetcher.close."""
        ...


class DataSource(Protocol):
    """The checked data of a run."""

    fingerprint: str
    url: str
    setting: str
    """The setting that names the data."""

    def open(self, request: BatchRequest) -> BatchStream: ...

    def digest(self, data: Data, seed: int, first: int, count: int) -> StreamDigest:
        """The digest of `count` sequences from position `first` on."""
        ...

    def attachments(self) -> Mapping[str, bytes]:
        """Files that each checkpoint holds beside the tensors."""
        ...


@dataclass(frozen=True)
class HeldoutResult:
    loss: float
    """Mean over the targets, the same on every rank."""
    sequences: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Workload(Protocol):
    mesh: Mesh
    source: DataSource

    def build_model(self, writer: EventWriter, *, is_new: bool) -> nn.Module:
        """This rank's part of the model. `is_new` False: a checkpoint or another rank provides the weights."""
        ...

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    def build_pass(self, writer: EventWriter) -> Pass: ...

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | TensorSlice]:
        """Every tensor of the training state by name, model.* and optim.*."""
        ...

    def evaluate(self, run: Run, model: nn.Module) -> HeldoutResult:
        """Measure the model on held-out data. A collective."""
        ...


def open_workload(run: Run, world: World, *, uneven: bool = False) -> Workload:
    """The workload of a run on this rank, with its data checked. Raises for a mesh or data that do not fit.

    `uneven`: the replicas need not have equally many micro-batches, because some were lost or added.
    """
    if run.workload == "dlrm":
        from lakh.trainer.workloads.dlrm import DlrmWorkload

        return DlrmWorkload(run, world)
    if run.preference.beta:
        from lakh.trainer.workloads.preference import PreferenceWorkload

        return PreferenceWorkload(run, world, uneven=uneven)
    from lakh.trainer.workloads.code import CodeWorkload

    return CodeWorkload(run, world, uneven=uneven)
