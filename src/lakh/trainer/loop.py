"""The training loop: a run from its first step to its last, on one rank of any number.

    RUN/run.toml          the complete settings
    RUN/events/           what happened, one file per rank
    RUN/checkpoints/      step-00000050, ...

`train` restores the newest undamaged checkpoint if there is one, so that starting, resuming and restarting are the same
call. On a GPU the metrics of a step are read one step late (observability/step_metrics.py), so that no step waits for
the one before; evaluation, checkpoints and rewinds read all pending metrics first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lakh import checkpoint, config, events
from lakh.checkpoint.slices import TensorSlice
from lakh.compute_threads import ComputeThreads
from lakh.errors import InfeasiblePlan, Interrupted, PeerLost, PeerTimeout
from lakh.events import AutoChoice, EventLog, NetworkTraffic, Restarted, RewindRefused, Rewound, RunEnded
from lakh.goodput import goodput
from lakh.spec import Fault, Run
from lakh.trainer.checkpointer import Checkpointer
from lakh.trainer.data import DataFeed
from lakh.trainer.evaluation import Evaluator
from lakh.trainer.launch.agreement import require_agreement, run_facts
from lakh.trainer.launch.world import World
from lakh.trainer.observability.collectives import CollectiveClock
from lakh.trainer.observability.compile_clock import CompileClock
from lakh.trainer.observability.event_writer import EventWriter, write_storage_delays
from lakh.trainer.observability.expert_load import ExpertLoadReport
from lakh.trainer.observability.sinks import export_events
from lakh.trainer.observability.step_metrics import MetricsQueue
from lakh.trainer.observability.traffic import TrafficCounter
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.recovery.elastic import ElasticGroup, LoopState, Reformed, ReplicasWaiting, local_tensor
from lakh.trainer.recovery.signals import StopRequest, inject_faults
from lakh.trainer.recovery.spikes import SpikePolicy
from lakh.trainer.run_folder import write_settings
from lakh.trainer.step import objective_of, update
from lakh.trainer.tuning.memory import is_out_of_memory
from lakh.trainer.workloads import open_workload

__all__ = ["TrainingResult", "train"]


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """How a run ended: at its last step, or earlier by a stop request."""

    step: int
    tokens: int
    loss: float
    heldout_loss: float
    checkpoint: str
    stream_sha256: str | None = None
    """Hash of all sequences since the first step; None if an old checkpoint has none."""
    goodput: dict[str, Any] = dataclasses.field(default_factory=dict)
    sent_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes that rank 0 sent over each tier of the network in one step."""
    stopped_by: str = ""


def train(
    run: Run,
    run_dir: str | Path,
    *,
    faults: Sequence[Fault] = (),
    restart_reason: str = "",
    detected_s: float | None = None,
) -> TrainingResult:
    """Train to the last step. Raises Interrupted after a checkpoint when SIGTERM or SIGINT asked to stop."""
    started_s = time.monotonic()
    with StopRequest().listen() as stop, World.join(run.train) as world, contextlib.ExitStack() as logs:
        elastic = ElasticGroup.of(run, world)
        carried: LoopState | None = None
        joined: Reformed | None = None
        if elastic is not None and world.is_joining:
            joined = elastic.join(run, world, stop)
            run, world, carried = joined.run, joined.world, joined.state
        elif world.size > 1:
            require_agreement(world, run_facts(run))
        log = logs.enter_context(EventLog(run_dir, world.rank))
        for change in joined.events if joined is not None and world.rank == 0 else ():
            log.write(change)
        if restart_reason and world.rank == 0:
            log.write(Restarted(attempt=world.attempt, reason=restart_reason, detected_s=detected_s))
        while True:
            loop: TrainingLoop | None = None
            try:
                with (
                    export_events(run.train, run_dir, rank=world.rank),
                    write_storage_delays(log),
                    world.peer_errors("training", run.train.peer_timeout_s),
                    _explain_out_of_memory(world),
                ):
                    loop = TrainingLoop(run, str(run_dir), world, log, carried)
                    result = loop.run_to_end(stop, faults, started_s, elastic)
                break
            except (PeerLost, PeerTimeout, ReplicasWaiting) as error:
                if loop is not None:
                    run, carried = loop.run, loop.state()  # this run has the sequences that a rewind skips
                if elastic is None or carried is None:
                    raise
                if loop is not None:
                    loop.checkpointer.drop_save()
                started_s = time.monotonic()
                reformed = elastic.reform(run, world, carried, error)
                run, world, carried = reformed.run, reformed.world, reformed.state
                log.close()
                log = logs.enter_context(EventLog(run_dir, world.rank))  # rank 0 may be another process now
                for change in reformed.events if world.rank == 0 else ():
                    log.write(change)
        reason = f"stopped by {result.stopped_by}" if result.stopped_by else "last step done"
        log.write(RunEnded(step=result.step, reason=reason, seconds=time.monotonic() - started_s))
    if result.stopped_by:
        found = f"stopped by {result.stopped_by} after the checkpoint {result.checkpoint}"
        raise Interrupted(f"step {result.step}", found, f"continue with: lakh resume {run_dir}")
    if world.rank != 0:
        return result
    written = events.read(run_dir, rank=0)
    sent = [dict(event.sent_bytes) for event in written if isinstance(event, NetworkTraffic)]
    return dataclasses.replace(result, goodput=goodput(written), sent_bytes=sent[-1] if sent else {})


class TrainingLoop:
    """The parts of a run on this rank, and the order in which they work."""

    def __init__(self, run: Run, run_dir: str, world: World, log: EventLog, carried: LoopState | None = None) -> None:
        """`carried`: the state to continue with after other ranks were lost; else the newest checkpoint is restored."""
        self.run, self._run_dir, self._world = run, run_dir, world
        workload = open_workload(run, world, uneven=carried is not None)
        self._events = EventWriter(run, world, log)
        self._data = DataFeed(workload.source, workload.mesh, world, seed=run.seed, last_step=run.train.steps)
        require_agreement(world, {"data": self._data.fingerprint})
        self._evaluator = Evaluator(run.train, workload, world, self._events)
        is_new = carried is None and not checkpoint.list_complete(run.checkpoint.url or run_dir)
        self._model = workload.build_model(self._events, is_new=is_new)
        self._optimizer = workload.build_optimizer(self._model)
        state = functools.partial(workload.state, self._model, self._optimizer)
        self.checkpointer = Checkpointer(run_dir, run.checkpoint, state, world, self._events)
        self._metrics = MetricsQueue(world, loss_ranks=world.size // workload.mesh.pp)
        self._expert_load = ExpertLoadReport(self._model, run.model, world, self._events)
        self._spikes = SpikePolicy(run.train)
        self._run_pass = workload.build_pass(self._events)
        self._track_updates()
        self._stopped_by, self._replicas_wait = "", False
        self._traffic_is_counted = world.size == 1
        self._compile_clock = CompileClock()
        is_shared = world.device.type == "cpu" and not run.train.threads
        ranks = min(world.local_size, world.size)
        self._threads = ComputeThreads(torch.get_num_threads() if is_shared else 1, ranks)
        self._collectives = CollectiveClock(world.board)
        if carried is None:
            self.run, self._step = self.checkpointer.restore(run, self._data)
            self._finished = self._step
        else:
            self._continue_from(carried)
        self._updated = self._step
        self._first_mesh = carried.mesh if carried is not None else run.mesh

    def run_to_end(
        self, stop: StopRequest, faults: Sequence[Fault], started_s: float, elastic: ElasticGroup | None = None
    ) -> TrainingResult:
        """Raises ReplicasWaiting at a step boundary when replicas ask to join."""
        self._elastic = elastic
        self._write_settings()
        self._events.run_started(
            step=self._step,
            position=self._data.stream.position,
            run_sha256=config.fingerprint(self.run),
            data_sha256=self._data.fingerprint,
            seconds=time.monotonic() - started_s,
        )
        self._events.step_predicted(self.run, step=self._step)
        if self._step == 0 and self.run.train.eval_every:
            self._evaluate()
        self._data.open(self.run.data, self._step)
        self._compile_clock.attach()
        is_done = False
        is_on_cpu, board = self._world.device.type == "cpu", self._world.board
        watches = self._world.size > 1 and (is_on_cpu or board is not None)
        try:
            with self._collectives if watches else contextlib.nullcontext():
                self._take_steps(stop, faults)
            total = self._data.stream.total_digest(self._world, self._data.digest)
            is_done = True
        finally:
            self._compile_clock.detach()
            self._data.close(keep=not is_done)  # another loop may continue, with other ranks
        self.checkpointer.forget_memory()
        is_complete = self._step == self.run.train.steps
        self._spikes.require_update(self._step)
        if is_complete and self._evaluator.step != self._step:
            self._evaluate()
        return TrainingResult(
            step=self._step,
            tokens=self._data.stream.position * self.run.data.sequence,
            loss=self._spikes.loss_at(self._step),
            heldout_loss=self._evaluator.loss,
            checkpoint=self.checkpointer.last_saved,
            stream_sha256=total.sha256 if total is not None else None,
            stopped_by="" if is_complete else self._stopped_by,
        )

    # --- steps ---

    def _take_steps(self, stop: StopRequest, faults: Sequence[Fault]) -> None:
        if self._step > self._finished:  # ranks were lost before this step was finished
            self._finish_step(stop)
        while self._step < self.run.train.steps and not self._stopped_by:
            if any(fault.step == self._step for fault in faults):
                self.checkpointer.finish_save()  # a fault always meets the same state, however slow the disk
                self.checkpointer.finish_copy()
            inject_faults(faults, rank=self._world.member, step=self._step, log=self._events.log)
            self._take_step(stop)
            self._share_cores()
            self._finish_step(stop)
            self._admit_replicas()

    def _share_cores(self) -> None:
        """Compute with fewer threads beside other busy processes."""
        count = self._threads.adjust()
        if count is not None:
            torch.set_num_threads(count)
            choice, reason = f"{count} on rank {self._world.rank}", self._threads.reason
            self._events.log.write(AutoChoice(step=self._step, what="threads", choice=choice, reason=reason))

    def _admit_replicas(self) -> None:
        """End this loop for one with more replicas, if some ask to join. A save in progress ends first, unless the
        next one is due."""
        can_wait = self.checkpointer.is_saving and not self.checkpointer.is_due(self._step + 1)
        if self._replicas_wait and not can_wait and not self._stopped_by and self._step < self.run.train.steps:
            self.checkpointer.finish_save()
            raise ReplicasWaiting

    def _take_step(self, stop: StopRequest) -> None:
        """Start one step, and read the metrics of the steps before it (on a CPU, of this one too)."""
        self._metrics.timer.start_once()
        self._collectives.start_step()
        batches, wait_s = self._data.micro_batches(self._step)
        lr = learning_rate(self._step, self.run.optim, self.run.train.steps)
        with self._count_traffic():
            result = update(
                self._model,
                self._optimizer,
                batches,
                lr=lr,
                clip_norm=self.run.optim.clip_norm,
                max_norm=self._spikes.max_norm,
                objective=objective_of(self.run.train),
                run_pass=self._run_pass,
            )
        self._updated = self._step + 1
        self._expert_load.after_step(self._step + 1)
        self._metrics.push(
            self._step + 1,
            lr,
            result,
            fill=self._data.batches.fill,
            stop=stop.is_made,
            joiners=self._world.rank == 0 and self._elastic is not None and bool(self._elastic.find_joiners()),
            phases_done=self.checkpointer.phases_done,
            data_wait_s=wait_s,
            compile_s=self._compile_clock.lap(),
            compute_s=self._collectives.compute_s() if self._world.device.type == "cpu" else None,
        )
        self._step += 1
        self._data.stream.position += self.run.data.batch
        while self._metrics.is_due and self._spikes.spike is None:
            self._read_metrics(stop)

    def _finish_step(self, stop: StopRequest) -> None:
        """Do what is due after a step: read metrics, rewind, evaluate, save."""
        is_last = self._step == self.run.train.steps
        eval_is_due, save_is_due = self._evaluator.is_due(self._step), self.checkpointer.is_due(self._step)
        if eval_is_due or save_is_due or is_last or self._replicas_wait:
            self._read_all_metrics(stop)
        if self._spikes.spike is None or not self._rewind(*self._spikes.spike):
            if eval_is_due or is_last:
                self._evaluate()
            if save_is_due or self._stopped_by or is_last:
                self._read_all_metrics(stop)
                self.checkpointer.begin_save(self.run, self._step, self._data)
                if self._stopped_by or is_last:
                    self.checkpointer.finish_save()
                    self.checkpointer.require_saved()
                self._metrics.timer.start()
            if self.checkpointer.is_copy_due(self._step) and not is_last:
                self._read_all_metrics(stop)
                self.checkpointer.copy_to_memory(self.run, self._step, self._data)
                self._metrics.timer.start()
        self._finished = self._step

    def _read_all_metrics(self, stop: StopRequest) -> None:
        while self._metrics and self._spikes.spike is None:
            self._read_metrics(stop)

    def _read_metrics(self, stop: StopRequest) -> None:
        metrics = self._metrics.pop()
        if metrics.stop_requests:
            self._stopped_by = stop.cause or "another rank"
        self._replicas_wait |= bool(metrics.join_requests)
        if self.checkpointer.advance_save(metrics.phases_done) and not self._metrics:
            self._metrics.timer.start()  # this time belongs to the checkpoint, not to the next step
        self._spikes.observe(metrics)
        self._events.step_done(metrics, self._data.batches.prefetcher)

    def _rewind(self, step: int, reason: str) -> bool:
        """Return to the last checkpoint and skip the sequences of the step with the spike. False if that is refused."""
        self._spikes.spike = None
        self.checkpointer.finish_save()
        refusal = self._spikes.refuse_rewind(self.checkpointer.last_saved)
        if refusal:
            self._events.write(RewindRefused(step=step, reason=reason, why=refusal))
            return False
        data = self._data.skip_step(self.run.data, step, self._step)
        self._data.close(keep=True)
        self._metrics.clear()
        run = dataclasses.replace(self.run, data=data)
        self.run, self._step = self.checkpointer.restore(run, self._data, from_memory=False)
        self._updated = self._step
        self._spikes.rewound(self._step)
        self._events.write(Rewound(step=step, to_step=self._step, reason=reason, skipped=data.skip))
        self._write_settings()
        self._data.open(self.run.data, self._step)
        return True

    def _evaluate(self) -> None:
        self._evaluator.evaluate(self.run, self._step, self._model)
        self._metrics.timer.start()

    @contextlib.contextmanager
    def _count_traffic(self) -> Iterator[None]:
        """Count the network traffic of the first step."""
        if self._traffic_is_counted:
            yield
            return
        with TrafficCounter(self.run.cluster) as traffic:
            yield
        self._traffic_is_counted = True
        self._events.write(NetworkTraffic(step=self._step + 1, sent_bytes=traffic.by_tier()))

    # --- state ---

    def state(self) -> LoopState:
        """The state to continue with when other ranks are lost."""
        stream = self._data.stream
        return LoopState(
            step=self._updated,
            position=stream.position + (self._updated - self._step) * self.run.data.batch,
            finished=self._finished,
            is_consistent=not self._is_updating,
            tensors=self._tensors,
            known_digest=stream.known,
            last_saved=self.checkpointer.last_saved,
            mesh=self._first_mesh,
        )

    def _continue_from(self, carried: LoopState) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(carried.tensors[name])
        self._step, self._finished, self.checkpointer.last_saved = carried.step, carried.finished, carried.last_saved
        self._data.catch_up(self.run.data, carried.position, carried.known_digest)

    def _track_updates(self) -> None:
        """Keep references to the tensors and note when an update changes them, for `state`."""
        self._tensors = {
            name: tensor.local if isinstance(tensor, TensorSlice) else local_tensor(tensor)
            for name, tensor in self.checkpointer.tensors.items()
        }
        self._is_updating = False
        self._optimizer.register_step_pre_hook(lambda *_: setattr(self, "_is_updating", True))
        self._optimizer.register_step_post_hook(lambda *_: setattr(self, "_is_updating", False))

    def _write_settings(self) -> None:
        """Record the settings for a resume, with the original mesh even after ranks were lost."""
        if self._world.rank == 0:
            write_settings(dataclasses.replace(self.run, mesh=self._first_mesh), self._run_dir)


@contextlib.contextmanager
def _explain_out_of_memory(world: World) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = f"does not fit into the memory of {world.device} ({str(error).partition('.')[0]})"
        todo = "make data.micro_batch smaller, or use more ranks"
        raise InfeasiblePlan(f"rank {world.rank}", found, todo) from None
