"""What a rank tells about the steps of a run, as events: rank 0 for all, each rank where it is about itself.

Knows what a step measured and writes it down; decides nothing and waits for nothing.
"""

from __future__ import annotations

from lakh import config, events
from lakh.events import EventLog, StepDone, StepSkipped
from lakh.spec import Run
from lakh.tokens.loading.training_data import TrainingData
from lakh.trainer.launch.world import World
from lakh.trainer.observability.step_metrics import StepMetrics
from lakh.trainer.state import TrainState
from lakh.trainer.tuning.memory import memory_bytes
from lakh.workloads.code.data import Batches

__all__ = ["EventWriter"]

RESOURCES_EVERY_STEPS = 10


class EventWriter:
    def __init__(self, run: Run, world: World, log: EventLog) -> None:
        self.run, self.world, self.log = run, world, log

    def chosen(self, what: str, choice: str, reason: str) -> None:
        """On a GPU, where there is something to choose from."""
        if self.world.rank == 0 and self.world.device.type == "cuda":
            self.log.write(events.AutoChoice(step=0, what=what, choice=choice, reason=reason))

    def started(self, run: Run, state: TrainState, data: TrainingData, *, seconds: float) -> None:
        """`run`: with what a checkpoint says about it."""
        self.log.write(events.Initialised(step=state.step, seconds=seconds))
        self.log.write(
            events.RunStarted(
                step=state.step,
                world=self.world.size,
                attempt=self.world.attempt,
                backend=self.world.backend if self.world.size > 1 else "none",
                device=str(self.world.device),
                parameters=run.model.parameters,
                sequence_index=state.position,
                run_sha256=config.fingerprint(run),
                data_sha256=data.fingerprint,
            )
        )

    def step(
        self, step: int, lr: float, measured: StepMetrics, seconds: float, wait_s: float, batches: Batches
    ) -> None:
        if not measured.applied:
            limit = "is too large" if measured.grad_norm < float("inf") else "is not finite"
            self.log.write(StepSkipped(step=step, reason=f"gradient norm {measured.grad_norm:.4g} {limit}"))
        if self.world.rank != 0:
            return
        self.log.write(
            StepDone(
                step=step,
                loss=measured.loss,
                lr=lr,
                grad_norm=measured.grad_norm,
                tokens=step * self.run.tokens_per_step,
                tokens_per_s=self.run.tokens_per_step / seconds,
                step_s=seconds,
                data_wait_s=wait_s,
                mfu=self._mfu(seconds),
            )
        )
        if step % RESOURCES_EVERY_STEPS == 1:
            memory = memory_bytes(self.world.device)
            ready, starved = batches.ready, batches.starved
            self.log.write(events.Resources(step=step, memory_bytes=memory, data_ready=ready, data_starved=starved))

    def _mfu(self, seconds: float) -> float | None:
        """Causal-exact model FLOPs over the dense peak of the cluster's GPU; None on a CPU, which states no peak."""
        if self.world.device.type != "cuda":
            return None
        peak = self.run.cluster.gpu.dense_bf16_TFLOPs * 1e12 * self.world.size
        return self.run.tokens_per_step * self.run.model.flops_per_token(self.run.data.sequence) / seconds / peak
