"""Write the events of a training run: rank 0 for the run, each rank for itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from lakh import events, storage
from lakh.events import Event, EventLog
from lakh.spec import Run
from lakh.tokens.loading.prefetch import Prefetcher
from lakh.trainer.launch.world import World
from lakh.trainer.observability.prediction import predict_step
from lakh.trainer.observability.step_metrics import StepMetrics
from lakh.trainer.observability.stragglers import WINDOW_STEPS, StragglerWatch
from lakh.trainer.tuning.memory import memory_bytes

__all__ = ["EventWriter", "write_storage_delays"]

RESOURCES_EVERY_STEPS = 10


def write_storage_delays(log: EventLog) -> contextlib.AbstractContextManager[None]:
    """Inside the block, requests of this rank to an object store that fail or are slow become events."""
    return storage.observe_delays(lambda delay: log.write(events.StorageDelayed(**delay._asdict())))


class EventWriter:
    def __init__(self, run: Run, world: World, log: EventLog) -> None:
        self._world, self.log, self._parameters = world, log, run.parameters
        self._stragglers = StragglerWatch()
        self._tokens_per_step = run.tokens_per_step
        self._flops_per_step = self._tokens_per_step * run.flops_per_token
        self._peak_flops = run.cluster.gpu.dense_bf16_TFLOPs * 1e12 * world.size

    def write(self, event: Event) -> None:
        """Write an event about the run, on rank 0."""
        if self._world.rank == 0:
            self.log.write(event)

    def auto_choice(self, what: str, choice: str, reason: str) -> None:
        """Report a choice on a GPU; a CPU has no alternatives."""
        if self._world.device.type == "cuda":
            self.write(events.AutoChoice(step=0, what=what, choice=choice, reason=reason))

    def run_started(self, *, step: int, position: int, run_sha256: str, data_sha256: str, seconds: float) -> None:
        self.log.write(events.Initialised(step=step, seconds=seconds))
        self.log.write(
            events.RunStarted(
                step=step,
                world=self._world.size,
                attempt=self._world.attempt,
                backend=self._world.backend if self._world.size > 1 else "none",
                device=str(self._world.device),
                parameters=self._parameters,
                sequence_index=position,
                run_sha256=run_sha256,
                data_sha256=data_sha256,
            )
        )

    def step_predicted(self, run: Run, *, step: int) -> None:
        device = self._world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        if self._world.rank == 0:
            self.log.write(predict_step(run, self._world.size, name, step=step))

    def step_done(self, metrics: StepMetrics, prefetcher: Prefetcher[Any]) -> None:
        step = metrics.step
        if not metrics.applied:
            problem = "is too large" if metrics.grad_norm < float("inf") else "is not finite"
            reason = f"gradient norm {metrics.grad_norm:.4g} {problem}"
            self.log.write(events.StepSkipped(step=step, reason=reason))
        if self._world.rank != 0:
            return
        self.log.write(
            events.StepDone(
                step=step,
                loss=metrics.loss,
                lr=metrics.lr,
                grad_norm=metrics.grad_norm,
                tokens=step * self._tokens_per_step,
                tokens_per_s=self._tokens_per_step / metrics.step_s,
                step_s=metrics.step_s,
                data_wait_s=metrics.data_wait_s,
                mfu=self._mfu(metrics.step_s),
                compile_s=metrics.compile_s,
                straggler_s=metrics.straggler_s,
                slowest_rank=metrics.slowest_rank,
            )
        )
        found = self._stragglers.observe(metrics.slowest_rank, metrics.straggler_s, metrics.others_s)
        if found is not None:
            rank, ratio = found
            self.log.write(events.StragglerFound(step=step, slow_rank=rank, ratio=ratio, steps=WINDOW_STEPS))
        if step % RESOURCES_EVERY_STEPS == 1:
            memory = memory_bytes(self._world.device)
            ready, starved = prefetcher.ready, prefetcher.starved
            self.log.write(events.Resources(step=step, memory_bytes=memory, data_ready=ready, data_starved=starved))

    def _mfu(self, step_s: float) -> float | None:
        """Causal-exact model FLOPs over the dense peak of the GPUs; None on a CPU, which has no stated peak."""
        return self._flops_per_step / step_s / self._peak_flops if self._world.device.type == "cuda" else None
