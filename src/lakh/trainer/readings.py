"""What a step measured, summed over ranks and read when the device has it: no step waits for the one before.

On a GPU the numbers travel to pinned memory behind the step's own work, and are read one step later; on a CPU they are
there at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.trainer.step import Updated
from lakh.trainer.world import World

__all__ = ["Measured", "Reading"]


@dataclass(frozen=True)
class Measured:
    loss: float
    """Mean over the counted targets of the step, over all ranks."""
    grad_norm: float
    applied: bool
    stops: int
    """Ranks that were asked to stop."""


class Reading:
    """The numbers of one step, on their way."""

    def __init__(self, done: Updated, *, fill: float, stop: bool, world: World, loss_ranks: int) -> None:
        """`fill`: share of this rank's places that count; `loss_ranks`: ranks that know a loss (others report 0)."""
        self._world_size, self._loss_ranks = world.size, loss_ranks
        device = done.loss.device
        known = torch.tensor([fill, float(stop)], dtype=torch.float64)
        known = known.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else known.to(device)
        summed = torch.cat([done.loss.detach().double().reshape(1), known])
        if world.size > 1:
            dist.all_reduce(summed)
        same = torch.stack([done.grad_norm.double(), done.applied.double()])  # equal on all ranks already
        self._values = _to_host(torch.cat([summed, same]))
        self._arrived = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Measured:
        """Waits until the step is done."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, fill, stops, norm, applied = self._values.tolist()
        mean = loss / self._loss_ranks
        return Measured(mean / (fill / self._world_size), norm, bool(applied), round(stops))


def _to_host(values: Tensor) -> Tensor:
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
