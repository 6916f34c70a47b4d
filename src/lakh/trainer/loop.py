"""A training run from its first step to its last, on one rank of any number.

    RUN/run.toml          the complete settings
    RUN/events/           what happened, one file per rank
    RUN/checkpoints/      step-00000050, ...

The state of a run is its tensors, the step, and the position in the data (state.py); `train` restores it from the
newest whole checkpoint when there is one, so starting, resuming and restarting after a crash are the same call.

On a GPU nothing waits for a step to end before the next one is on its way: losses are read one step late
(readings.py). What must not be late (evaluation, checkpoints, a rewind) reads everything first. A checkpoint is copied
between two steps and written behind the next ones; the numbers of each step also say which ranks are done with that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lakh import checkpoint, events
from lakh.errors import InfeasiblePlan, Interrupted, PeerLost, PeerTimeout
from lakh.events import Evaluated, Log, Restarted, RunEnded
from lakh.goodput import goodput
from lakh.loss_spikes import HISTORY, detect_loss_spike, grad_norm_limit
from lakh.spec import Fault, Run
from lakh.spec.cuts import check
from lakh.tokens.training_data import open_data
from lakh.trainer.evaluation import heldout_loss
from lakh.trainer.graphs import Graphed, choose_graphs
from lakh.trainer.hooks import load_hook
from lakh.trainer.initial import builder
from lakh.trainer.memory import ran_out
from lakh.trainer.optim import build_optimizer, named_state
from lakh.trainer.readings import Reading, StepClock
from lakh.trainer.recovery import StopRequest, strike
from lakh.trainer.run_folder import record
from lakh.trainer.sinks import showing
from lakh.trainer.state import State
from lakh.trainer.step import objective_of, plain_pass, update, uses_bf16
from lakh.trainer.survive import Carried, Survivors, held
from lakh.trainer.telling import Telling
from lakh.trainer.traffic import Traffic
from lakh.trainer.world import World
from lakh.workloads.code.data import Batches
from lakh.workloads.code.parallel import parallelise

__all__ = ["Outcome", "train"]

MAX_REWINDS = 3  # from one checkpoint; then the data is not to blame


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: by its last step, or earlier because it was asked to stop."""

    step: int
    tokens: int
    loss: float
    heldout_loss: float
    checkpoint: str
    stream_sha256: str | None = None
    """Of every sequence consumed from the first step on; None where an old checkpoint does not know."""
    goodput: dict[str, Any] = dataclasses.field(default_factory=dict)
    sent_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """What rank 0 sent over each tier of the network in the step that was counted."""
    stopped_by: str = ""


def train(run: Run, run_dir: str | Path, *, faults: Sequence[Fault] = (), restart_reason: str = "") -> Outcome:
    """Train to the last step. Raises Interrupted after a checkpoint when SIGTERM or SIGINT asked for it."""
    started = time.monotonic()
    with StopRequest().listen() as stop, World.join(run.train) as world, contextlib.ExitStack() as logs:
        log = logs.enter_context(Log(run_dir, world.rank))
        if restart_reason and world.rank == 0:
            log.write(Restarted(attempt=world.attempt, reason=restart_reason))
        survivors = Survivors.of(run, world)
        carried: Carried | None = None
        while True:
            training: _Training | None = None
            try:
                with showing(run.train, run_dir, rank=world.rank), world.peers("training", run.train.peer_timeout_s):
                    training = _Training(run, str(run_dir), world, log, started, carried)
                    outcome = training.to_the_end(stop, faults)
                break
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                found = f"does not fit into the memory of {world.device} ({str(error).partition('.')[0]})"
                raise InfeasiblePlan(
                    f"rank {world.rank}", found, "make data.micro_batch smaller, or use more ranks"
                ) from None
            except (PeerLost, PeerTimeout) as error:
                if training is not None:
                    run, carried = training.run, training.carried()  # its run knows what a rewind passes over
                if survivors is None or carried is None:
                    raise
                if training is not None:
                    training.state.drop_save()
                started = time.monotonic()
                run, world, carried, lost = survivors.go_on(run, world, carried, error)
                log.close()
                log = logs.enter_context(Log(run_dir, world.rank))  # the lowest that is left speaks for all
                if world.rank == 0:
                    log.write(lost)
        reason = f"stopped by {outcome.stopped_by}" if outcome.stopped_by else "last step done"
        log.write(RunEnded(step=outcome.step, reason=reason, seconds=time.monotonic() - started))
    if outcome.stopped_by:
        raise Interrupted(
            f"step {outcome.step}",
            f"stopped by {outcome.stopped_by} after the checkpoint {outcome.checkpoint}",
            f"go on with: lakh resume {run_dir}",
        )
    if world.rank != 0:
        return outcome
    told = events.read(run_dir, rank=0)
    counted = [dict(event.sent_bytes) for event in told if isinstance(event, events.Traffic)]
    return dataclasses.replace(outcome, goodput=goodput(told), sent_bytes=counted[-1] if counted else {})


class _Training:
    """The moving parts of one run on this rank."""

    def __init__(
        self, run: Run, run_dir: str, world: World, log: Log, started: float, carried: Carried | None = None
    ) -> None:
        self.run, self.run_dir, self.world, self.log, self.started = run, run_dir, world, log, started
        self.mesh = check(run, world.size)
        self.telling = Telling(run, world, log)
        self.hooks = [load_hook(name) for name in run.train.hooks]
        self.data = open_data(run)
        model = self._build_model(is_new=carried is None and not checkpoint.list_complete(run_dir))
        self.state = State(run_dir, model, build_optimizer(model, run.optim), world, log)
        if carried is None:
            self.run = run = self.state.restore(run, self.data)
        else:
            carried.put_into(self.state, run)
        self.first_mesh = carried.mesh if carried is not None else run.mesh
        self.finished = carried.finished if carried is not None else self.state.step
        """The last step whose evaluation and checkpoint, where due, are done."""
        self.taken = self.state.step
        """Steps that the tensors have taken; one more than state.step between an update and what it measured."""
        self.tensors = {name: held(tensor) for name, tensor in named_state(model, self.state.optimizer).items()}
        self.in_update = False
        self.state.optimizer.register_step_pre_hook(lambda *_: setattr(self, "in_update", True))
        self.state.optimizer.register_step_post_hook(lambda *_: setattr(self, "in_update", False))
        records, reason = choose_graphs(run, device=world.device.type, world=world.size)
        self.telling.chosen("graphs", "recorded" if records else "none", reason)
        self.graphed = Graphed(plain_pass(objective_of(run))) if records else None
        self.heldout, self.evaluated = float("nan"), -1
        self.traffic_told = False
        self.pending: list[tuple[int, float, Reading, float]] = []  # step, lr, numbers on their way, wait for data
        self.losses: dict[int, float] = {}
        self.norms: list[float] = []
        self.rewinds: dict[int, int] = {}
        self.stopped_by = ""
        self.clock = StepClock(world.device)
        self.spoilt: tuple[int, str] | None = None

    def to_the_end(self, stop: StopRequest, faults: Sequence[Fault]) -> Outcome:
        run, state = self.run, self.state
        self._record_settings()
        self.telling.started(run, state, self.data, seconds=time.monotonic() - self.started)
        if state.step == 0 and run.train.eval_every:
            self.heldout, self.evaluated = self._evaluate(), 0
        self.batches = self._open_batches()
        try:
            if state.step > self.finished:  # ranks were lost in the middle of it
                self._finish_step(stop)
            while state.step < run.train.steps and not self.stopped_by:
                if any(fault.step == state.step for fault in faults):
                    state.finish_save()  # an ordered blow falls at one place in the run, whatever the disk does
                strike(faults, rank=self.world.member, step=state.step, log=self.log)
                self._take_step(stop)
                self._finish_step(stop)
            total = state.total_digest(self._digest())
        finally:
            self.batches.close()
        ended = state.step == run.train.steps
        if ended and self.evaluated != state.step:
            self.heldout = self._evaluate()
        return Outcome(
            step=state.step,
            tokens=state.position * run.data.sequence,
            loss=self.losses.get(state.step, float("nan")),
            heldout_loss=self.heldout,
            checkpoint=state.last_saved,
            stream_sha256=total.sha256 if total is not None else None,
            stopped_by="" if ended else self.stopped_by,
        )

    def carried(self) -> Carried:
        """What this rank brings along when others were lost."""
        state, ahead = self.state, self.taken - self.state.step
        return Carried(
            step=self.taken,
            position=state.position + ahead * self.run.data.batch,
            finished=self.finished,
            whole=not self.in_update,
            tensors=self.tensors,
            known=state.known,
            last_saved=state.last_saved,
            mesh=self.first_mesh,
        )

    # --- steps ---

    def _finish_step(self, stop: StopRequest) -> None:
        """What is due after a step: reading what it measured, a rewind, an evaluation, a checkpoint."""
        run, state = self.run, self.state
        last = state.step == run.train.steps
        due_eval = bool(run.train.eval_every) and state.step % run.train.eval_every == 0
        due_save = bool(run.checkpoint.every) and state.step % run.checkpoint.every == 0
        if due_eval or due_save or last:
            self._read_all(stop)
        if self.spoilt is None or not self._rewind(*self.spoilt):
            if due_eval or last:
                self.heldout, self.evaluated = self._evaluate(), state.step
            if due_save or self.stopped_by or last:
                self._read_all(stop)
                state.begin_save(self.run, self.data, self._digest())
                if self.stopped_by or last:
                    state.finish_save()
                self.clock.start()
        self.finished = state.step

    def _take_step(self, stop: StopRequest) -> None:
        """Put one step on its way, and read those before it (on a CPU, this one too)."""
        state, waited = self.state, self.batches.wait_s
        self.clock.start_once()
        batches = self.batches.micro_batches(state.step, self.world.device)
        limit = float("inf")
        if self.run.train.on_spike == "skip":
            limit = grad_norm_limit(self.norms, self.run.train.spike_factor)
        due = self.world.size > 1 and not self.traffic_told
        with Traffic(self.run.cluster) if due else contextlib.nullcontext() as traffic:
            done = update(
                self.run, state.model, state.optimizer, batches, state.step, max_norm=limit, graphed=self.graphed
            )
        self.taken = state.step + 1
        if traffic is not None:
            self.traffic_told = True
            if self.world.rank == 0:
                self.log.write(events.Traffic(step=state.step + 1, sent_bytes=traffic.by_tier()))
        reading = Reading(
            done,
            fill=self.batches.fill,
            stop=stop.is_made,
            written=state.is_written,
            world=self.world,
            loss_ranks=self.world.size // self.mesh.pp,
        )
        state.step += 1
        state.position += self.run.data.batch
        self.pending.append((state.step, done.lr, reading, self.batches.wait_s - waited))
        late = 1 if self.world.device.type == "cuda" else 0
        while len(self.pending) > late and self.spoilt is None:
            self._read_one(stop)

    def _read_all(self, stop: StopRequest) -> None:
        while self.pending and self.spoilt is None:
            self._read_one(stop)

    def _read_one(self, stop: StopRequest) -> None:
        step, lr, reading, wait_s = self.pending.pop(0)
        measured = reading.read()
        seconds = self.clock.lap(reading)
        if measured.stops:
            self.stopped_by = stop.signal or "another rank"
        if measured.is_written:
            self.state.finish_save()
            if not self.pending:
                self.clock.start()  # that time is the checkpoint's, not the next step's
        if self.run.train.on_spike == "rewind":
            before = [self.losses[known] for known in sorted(self.losses) if known < step]
            verdict = detect_loss_spike(measured.loss, before, self.run.train.spike_factor)
            self.spoilt = (step, verdict.reason) if verdict.is_spike else None
        self.telling.step(step, lr, measured, seconds, wait_s, self.batches)
        self.losses[step] = measured.loss
        self.losses.pop(step - 2 * HISTORY, None)
        if measured.applied:
            self.norms = [*self.norms[1 - HISTORY :], measured.grad_norm]

    def _rewind(self, step: int, reason: str) -> bool:
        """Go back to the last checkpoint, and never read the sequences of the step that spoilt the run again.

        False where there is no way back: the run goes on as it is.
        """
        self.spoilt = None
        state, batch = self.state, self.run.data.batch
        state.finish_save()
        here = state.last_saved
        base = int(here.rpartition("-")[2]) if here else -1
        self.rewinds[base] = self.rewinds.get(base, 0) + 1
        if not here or self.rewinds[base] > MAX_REWINDS:
            why = "there is no checkpoint to go back to" if not here else f"{MAX_REWINDS} rewinds did not help"
            if self.world.rank == 0:
                self.log.write(events.RewindRefused(step=step, reason=reason, why=why))
            return False
        first = state.position - (state.step - step + 1) * batch
        skips = self.batches.skips.with_positions(first, first + batch)
        self.run = dataclasses.replace(self.run, data=dataclasses.replace(self.run.data, skip=skips.ranges))
        self.batches.close()
        self.pending.clear()
        self.run = state.restore(self.run, self.data)
        self.taken = state.step
        self.losses = {known: loss for known, loss in self.losses.items() if known <= state.step}
        if self.world.rank == 0:
            self.log.write(events.Rewound(step=step, to_step=state.step, reason=reason, skipped=skips.ranges))
        self._record_settings()
        self.batches = self._open_batches()
        return True

    # --- evaluation ---

    def _evaluate(self) -> float:
        began = time.monotonic()
        state = self.state
        loss, sequences = heldout_loss(self.run, self.mesh, state.model, self.world, self.data.heldout)
        for hook in self.hooks:
            measured = hook.measure(self.run, state.step, state.model, self.world)
            if self.world.rank == 0:
                self.log.write(events.Measured(step=state.step, hook=hook.name, values=measured))
        if self.world.rank == 0:
            seconds = time.monotonic() - began
            self.log.write(Evaluated(step=state.step, loss=loss, sequences=sequences, seconds=seconds))
        self.clock.start()
        return loss

    # --- parts ---

    def _build_model(self, *, is_new: bool) -> nn.Module:
        """`is_new`: its first weights matter, because no others are put into it."""
        groups = self.world.groups(self.mesh, self.run.train.peer_timeout_s)
        bf16, device = uses_bf16(self.run, self.world.device), self.world.device
        model = parallelise(
            self.run,
            self.mesh,
            groups,
            builder(self.run, is_new=is_new),
            bf16=bf16,
            device=device,
            say=lambda it: self.telling.chosen(*it),
        )
        if self.run.train.replica_codec != "none" and groups.fsdp is not None and self.mesh.dp_replicate > 1:
            from lakh.c3.hsdp import encode_replicas

            encode_replicas(model, groups.fsdp.get_group("dp_replicate"), self.run.train.replica_codec)
        return model

    def _open_batches(self) -> Batches:
        return Batches(
            self.run,
            data_rank=self.mesh.data_rank(self.world.rank),
            data_ranks=self.mesh.data_ranks,
            first_step=self.state.step,
            first_position=self.state.position,
        )

    def _digest(self) -> Any:
        """Of what this rank read, where it is the first of those that read the same."""
        own = self.mesh.data_rank(self.world.rank)
        first = next(rank for rank in range(self.world.size) if self.mesh.data_rank(rank) == own)
        return self.batches.digest if first == self.world.rank else type(self.batches.digest)()

    def _record_settings(self) -> None:
        """What the run goes on with, for whoever resumes it: on the ranks that it was asked for, were some lost."""
        if self.world.rank == 0:
            record(dataclasses.replace(self.run, mesh=self.first_mesh), self.run_dir)
