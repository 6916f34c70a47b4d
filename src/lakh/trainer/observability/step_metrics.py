"""What a step measured, summed over ranks and read when the device has it: no step waits for the one before.

On a GPU the numbers travel to pinned memory behind the step's own work, and are read one step later; on a CPU they are
there at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.trainer.launch.world import World
from lakh.trainer.step import UpdateResult

__all__ = ["PendingMetrics", "StepMetrics", "StepTimer"]


@dataclass(frozen=True)
class StepMetrics:
    loss: float
    """Mean over the counted targets of the step, over all ranks."""
    grad_norm: float
    applied: bool
    stops: int
    """Ranks that were asked to stop."""
    is_written: bool
    """Every rank has written its part of the checkpoint under way."""


class PendingMetrics:
    """The numbers of one step, on their way."""

    def __init__(
        self, done: UpdateResult, *, fill: float, stop: bool, written: bool, world: World, loss_ranks: int
    ) -> None:
        """`fill`: share of this rank's places that count; `loss_ranks`: ranks that know a loss (others report 0)."""
        self._world_size, self._loss_ranks = world.size, loss_ranks
        device = done.loss.device
        known = torch.tensor([fill, float(stop), float(written)], dtype=torch.float64)
        known = known.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else known.to(device)
        summed = torch.cat([done.loss.detach().double().reshape(1), known])
        if world.size > 1:
            dist.all_reduce(summed)
        same = torch.stack([done.grad_norm.double(), done.applied.double()])  # equal on all ranks already
        self._values = _to_host(torch.cat([summed, same]))
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event(enable_timing=True)
            self._arrived.record()

    def read(self) -> StepMetrics:
        """Waits until the step is done."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, fill, stops, written, norm, applied = self._values.tolist()
        mean = loss / self._loss_ranks
        return StepMetrics(
            loss=mean / (fill / self._world_size),
            grad_norm=norm,
            applied=bool(applied),
            stops=round(stops),
            is_written=round(written) == self._world_size,
        )


class StepTimer:
    """Seconds of each step: on a GPU by its own clock, since readings come late; else by the time they are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began_s = 0.0
        self._mark: torch.cuda.Event | None = None

    def start(self) -> None:
        """From here on time belongs to the next step. Called when no step is on its way."""
        self._began_s = time.monotonic()
        if self._on_gpu:
            self._mark = torch.cuda.Event(enable_timing=True)
            self._mark.record()

    def start_once(self) -> None:
        if not self._began_s:
            self.start()

    def lap(self, reading: PendingMetrics) -> float:
        """Seconds since the step before, or since `start`. The reading must have been read."""
        now = time.monotonic()
        seconds, self._began_s = now - self._began_s, now
        if self._mark is not None and reading._arrived is not None:
            seconds, self._mark = self._mark.elapsed_time(reading._arrived) / 1e3, reading._arrived
        return max(seconds, 1e-9)


def _to_host(values: Tensor) -> Tensor:
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
