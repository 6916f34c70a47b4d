"""Step metrics: summed over ranks, and read without stopping the GPU.

On a GPU the numbers are copied to pinned memory behind the step's own work and read one step later; on a CPU they are
available immediately.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.trainer.launch.world import World
from lakh.trainer.step import UpdateResult

__all__ = ["MetricsQueue", "StepMetrics", "straggler_seconds"]

RANK_BITS = 20


@dataclass(frozen=True)
class StepMetrics:
    step: int
    lr: float
    loss: float
    """Mean over the targets of the step on all ranks."""
    grad_norm: float
    applied: bool
    stop_requests: int
    """Ranks that were asked to stop."""
    join_requests: int
    """Ranks that know of replicas which ask to join."""
    phases_done: int
    """Phases of the save in progress that every rank has ended."""
    step_s: float
    data_wait_s: float
    compile_s: float = 0.0
    straggler_s: float = 0.0
    """How much longer the slowest rank computed than the mean of the others."""
    slowest_rank: int | None = None
    others_s: float = 0.0
    """Mean compute time of the other ranks."""


def straggler_seconds(slowest_s: float, total_s: float, ranks: int) -> float:
    """How much longer the slowest of the ranks computed than the mean of the others."""
    return max(0.0, slowest_s - (total_s - slowest_s) / (ranks - 1))


class MetricsQueue:
    """The metrics of the steps in flight."""

    def __init__(self, world: World, *, loss_ranks: int) -> None:
        """`loss_ranks`: ranks that have a loss; with pipelines the other stages report 0."""
        self._world, self._loss_ranks = world, loss_ranks
        self._pending: deque[_PendingMetrics] = deque()
        self._delay = 1 if world.device.type == "cuda" else 0
        self.timer = StepTimer(world.device)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_due(self) -> bool:
        """Whether the oldest step should be read now."""
        return len(self._pending) > self._delay

    def push(
        self,
        step: int,
        lr: float,
        result: UpdateResult,
        *,
        fill: float,
        stop: bool,
        joiners: bool,
        phases_done: int,
        data_wait_s: float,
        compile_s: float = 0.0,
        compute_s: float | None = None,
    ) -> None:
        """Sum the metrics of a step over all ranks. `fill`: share of this rank's positions with a target; `compute_s`:
        this rank's time outside of collectives, None where it is not known (on all ranks alike)."""
        device = result.loss.device
        known = torch.tensor([fill, float(stop), float(joiners), float(phases_done)], dtype=torch.float64)
        known = known.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else known.to(device)
        summed = torch.cat([result.loss.detach().double().reshape(1), known])
        if self._world.size > 1:
            dist.all_reduce(summed)
        equal = torch.stack([result.grad_norm.double(), result.applied.double()])  # the same on all ranks
        values, arrived = _to_host(torch.cat([summed, equal])), None
        if device.type == "cuda":
            arrived = torch.cuda.Event(enable_timing=True)
            arrived.record()
        slowest = self._find_slowest(compute_s) if compute_s is not None else (0.0, None, 0.0)
        self._pending.append(_PendingMetrics(step, lr, data_wait_s, compile_s, slowest, values, arrived))

    def _find_slowest(self, compute_s: float) -> tuple[float, int | None, float]:
        """(seconds that the slowest rank needed more than the mean of the others, its number, that mean). A
        collective."""
        if self._world.size == 1:
            return 0.0, None, 0.0
        microseconds = int(compute_s * 1e6)
        slowest = torch.tensor([microseconds << RANK_BITS | self._world.rank], dtype=torch.int64)
        total = torch.tensor([microseconds], dtype=torch.int64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        most, rank = divmod(int(slowest), 1 << RANK_BITS)
        others_s = (int(total) - most) / 1e6 / (self._world.size - 1)
        return straggler_seconds(most / 1e6, int(total) / 1e6, self._world.size), rank, others_s

    def pop(self) -> StepMetrics:
        """The metrics of the oldest step; waits until the step is done."""
        pending = self._pending.popleft()
        if pending.arrived is not None:
            pending.arrived.synchronize()
        loss, fill, stops, joins, phases, norm, applied = pending.values.tolist()
        return StepMetrics(
            step=pending.step,
            lr=pending.lr,
            loss=loss / self._loss_ranks / (fill / self._world.size),
            grad_norm=norm,
            applied=bool(applied),
            stop_requests=round(stops),
            join_requests=round(joins),
            phases_done=round(phases) // self._world.size,  # ranks are at most one phase apart
            step_s=self.timer.lap(pending.arrived),
            data_wait_s=pending.data_wait_s,
            compile_s=pending.compile_s,
            straggler_s=pending.slowest[0],
            slowest_rank=pending.slowest[1],
            others_s=pending.slowest[2],
        )

    def clear(self) -> None:
        self._pending.clear()


@dataclass(frozen=True)
class _PendingMetrics:
    step: int
    lr: float
    data_wait_s: float
    compile_s: float
    slowest: tuple[float, int | None, float]
    values: Tensor
    arrived: torch.cuda.Event | None


class StepTimer:
    """Seconds of each step: by the GPU's clock, because metrics are read late, or by the host's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began_s = 0.0
        self._mark: torch.cuda.Event | None = None

    def start(self) -> None:
        """Count time for the next step from now on. Call it while no step is in flight."""
        self._began_s = time.monotonic()
        if self._on_gpu:
            self._mark = torch.cuda.Event(enable_timing=True)
            self._mark.record()

    def start_once(self) -> None:
        if not self._began_s:
            self.start()

    def lap(self, arrived: torch.cuda.Event | None) -> float:
        """Seconds since the previous step, or since `start`, until the metrics arrived."""
        now_s = time.monotonic()
        seconds, self._began_s = now_s - self._began_s, now_s
        if self._mark is not None and arrived is not None:
            seconds, self._mark = self._mark.elapsed_time(arrived) / 1e3, arrived
        return max(seconds, 1e-9)


def _to_host(values: Tensor) -> Tensor:
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
