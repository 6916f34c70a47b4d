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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lakh import checkpoint, config, events
from lakh.errors import InfeasiblePlan, Interrupted, PeerLost, PeerTimeout
from lakh.events import EventLog, NetworkTraffic, Restarted, RewindRefused, Rewound, RunEnded
from lakh.goodput import goodput
from lakh.spec import Fault, Mesh, Run
from lakh.spec.parallel_check import check_parallelism
from lakh.trainer.checkpointer import Checkpointer
from lakh.trainer.data import DataFeed
from lakh.trainer.evaluation import Evaluator
from lakh.trainer.initial_weights import model_builder
from lakh.trainer.launch.agreement import require_agreement, run_facts
from lakh.trainer.launch.world import World
from lakh.trainer.observability.collectives import CollectiveClock
from lakh.trainer.observability.compile_clock import CompileClock
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.observability.sinks import export_events
from lakh.trainer.observability.step_metrics import MetricsQueue
from lakh.trainer.observability.traffic import TrafficCounter
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.recovery.elastic import ElasticGroup, LoopState, local_tensor
from lakh.trainer.recovery.signals import StopRequest, inject_faults
from lakh.trainer.recovery.spikes import SpikePolicy
from lakh.trainer.run_folder import write_settings
from lakh.trainer.step import objective_of, plain_pass, update, uses_bf16
from lakh.trainer.tuning.cuda_graphs import GraphedPass, decide_cuda_graphs
from lakh.trainer.tuning.memory import is_out_of_memory
from lakh.workloads.code.parallel import parallelise

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
        if world.size > 1:
            require_agreement(world, run_facts(run))
        log = logs.enter_context(EventLog(run_dir, world.rank))
        if restart_reason and world.rank == 0:
            log.write(Restarted(attempt=world.attempt, reason=restart_reason, detected_s=detected_s))
        elastic = ElasticGroup.of(run.train, run.mesh, world)
        carried: LoopState | None = None
        while True:
            loop: TrainingLoop | None = None
            try:
                with (
                    export_events(run.train, run_dir, rank=world.rank),
                    world.peer_errors("training", run.train.peer_timeout_s),
                    _explain_out_of_memory(world),
                ):
                    loop = TrainingLoop(run, str(run_dir), world, log, carried)
                    result = loop.run_to_end(stop, faults, started_s)
                break
            except (PeerLost, PeerTimeout) as error:
                if loop is not None:
                    run, carried = loop.run, loop.state()  # this run has the sequences that a rewind skips
                if elastic is None or carried is None:
                    raise
                if loop is not None:
                    loop.checkpointer.drop_save()
                started_s = time.monotonic()
                run, world, carried, lost = elastic.rejoin(run, world, carried, error)
                log.close()
                log = logs.enter_context(EventLog(run_dir, world.rank))  # rank 0 may be another process now
                if world.rank == 0:
                    log.write(lost)
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
        self._mesh = check_parallelism(run, world.size)
        self._events = EventWriter(run.model, run.data, run.cluster.gpu, world, log)
        self._data = DataFeed(
            run.data, self._mesh, world, vocab=run.model.vocab, seed=run.seed, last_step=run.train.steps
        )
        require_agreement(world, {"data": self._data.fingerprint})
        self._evaluator = Evaluator(run.train, self._mesh, world, self._data.heldout, self._events)
        is_new = carried is None and not checkpoint.list_complete(run.checkpoint.url or run_dir)
        self._model = build_model(run, self._mesh, world, self._events, is_new=is_new)
        self._optimizer = build_optimizer(self._model, run.optim)
        self.checkpointer = Checkpointer(run_dir, run.checkpoint, self._model, self._optimizer, world, self._events)
        self._metrics = MetricsQueue(world, loss_ranks=world.size // self._mesh.pp)
        self._spikes = SpikePolicy(run.train)
        self._graphed = self._build_graphs()
        self._track_updates()
        self._stopped_by = ""
        self._traffic_is_counted = world.size == 1
        self._compile_clock = CompileClock()
        self._collectives = CollectiveClock(world.board)
        if carried is None:
            self.run, self._step = self.checkpointer.restore(run, self._data)
            self._finished = self._step
        else:
            self._continue_from(carried)
        self._updated = self._step
        self._first_mesh = carried.mesh if carried is not None else run.mesh

    def run_to_end(self, stop: StopRequest, faults: Sequence[Fault], started_s: float) -> TrainingResult:
        self._write_settings()
        self._events.run_started(
            step=self._step,
            position=self._data.stream.position,
            run_sha256=config.fingerprint(self.run),
            data_sha256=self._data.fingerprint,
            seconds=time.monotonic() - started_s,
        )
        if self._step == 0 and self.run.train.eval_every:
            self._evaluate()
        self._data.open(self.run.data, self._step)
        self._compile_clock.attach()
        watches = self._world.size > 1 and self._world.device.type == "cpu"
        try:
            with self._collectives if watches else contextlib.nullcontext():
                self._take_steps(stop, faults)
            total = self._data.stream.total_digest(self._world, self._data.digest)
        finally:
            self._compile_clock.detach()
            self._data.close()
        is_complete = self._step == self.run.train.steps
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
                self.checkpointer.finish_save()  # a fault always meets the same checkpoint, however slow the disk
            inject_faults(faults, rank=self._world.member, step=self._step, log=self._events.log)
            self._take_step(stop)
            self._finish_step(stop)

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
                graphed=self._graphed,
            )
        self._updated = self._step + 1
        self._metrics.push(
            self._step + 1,
            lr,
            result,
            fill=self._data.batches.fill,
            stop=stop.is_made,
            written=self.checkpointer.is_written,
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
        if eval_is_due or save_is_due or is_last:
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
        self._finished = self._step

    def _read_all_metrics(self, stop: StopRequest) -> None:
        while self._metrics and self._spikes.spike is None:
            self._read_metrics(stop)

    def _read_metrics(self, stop: StopRequest) -> None:
        metrics = self._metrics.pop()
        if metrics.stop_requests:
            self._stopped_by = stop.signal or "another rank"
        if metrics.is_written:
            self.checkpointer.finish_save()
            if not self._metrics:
                self._metrics.timer.start()  # this time belongs to the checkpoint, not to the next step
        self._spikes.observe(metrics)
        self._events.step_done(metrics, self._data.batches)

    def _rewind(self, step: int, reason: str) -> bool:
        """Return to the last checkpoint and skip the sequences of the step with the spike. False if that is refused."""
        self._spikes.spike = None
        self.checkpointer.finish_save()
        refusal = self._spikes.refuse_rewind(self.checkpointer.last_saved)
        if refusal:
            self._events.write(RewindRefused(step=step, reason=reason, why=refusal))
            return False
        data = self._data.skip_step(self.run.data, step, self._step)
        self._data.close()
        self._metrics.clear()
        self.run, self._step = self.checkpointer.restore(dataclasses.replace(self.run, data=data), self._data)
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
        self._tensors = {name: local_tensor(tensor) for name, tensor in self.checkpointer.tensors.items()}
        self._is_updating = False
        self._optimizer.register_step_pre_hook(lambda *_: setattr(self, "_is_updating", True))
        self._optimizer.register_step_post_hook(lambda *_: setattr(self, "_is_updating", False))

    def _build_graphs(self) -> GraphedPass | None:
        run = self.run
        enabled, reason = decide_cuda_graphs(
            run.train, run.data, run.model, device=self._world.device.type, world=self._world.size
        )
        self._events.auto_choice("graphs", "recorded" if enabled else "none", reason)
        return GraphedPass(plain_pass(objective_of(run.train))) if enabled else None

    def _write_settings(self) -> None:
        """Record the settings for a resume, with the original mesh even after ranks were lost."""
        if self._world.rank == 0:
            write_settings(dataclasses.replace(self.run, mesh=self._first_mesh), self._run_dir)


def build_model(run: Run, mesh: Mesh, world: World, writer: EventWriter, *, is_new: bool) -> nn.Module:
    """This rank's part of the model. `is_new` False: a checkpoint or another rank provides the weights."""
    groups = world.groups(mesh, run.train.peer_timeout_s)
    model = parallelise(
        run,
        mesh,
        groups,
        model_builder(run.model, run.seed, run.init_from if is_new else ""),
        bf16=uses_bf16(run.train, world.device),
        device=world.device,
        on_choice=lambda choice: writer.auto_choice(*choice),
    )
    if run.train.replica_codec != "none" and groups.fsdp is not None and mesh.dp_replicate > 1:
        from lakh.c3.torch.hsdp import encode_replicas

        encode_replicas(model, groups.fsdp.get_group("dp_replicate"), run.train.replica_codec)
    return model


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
