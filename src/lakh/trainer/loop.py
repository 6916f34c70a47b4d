"""A training run from its first step to its last, on one rank of any number.

    RUN/run.toml          the complete settings
    RUN/events/           what happened, one file per rank
    RUN/checkpoints/      step-00000050, ...

The state of a run is its tensors, the step, and the global sequence index; `train` restores it from the newest
whole checkpoint when there is one, so starting, resuming and restarting after a crash are the same call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lakh import checkpoint, config, storage
from lakh.errors import CorruptCheckpoint, InfeasiblePlan, Interrupted, UserError
from lakh.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Log,
    Restarted,
    RunEnded,
    RunStarted,
    SettingChanged,
    StepDone,
    StepSkipped,
)
from lakh.spec import Fault, Run
from lakh.trainer.optim import build_optimizer, named_state
from lakh.trainer.recovery import StopRequest, strike
from lakh.trainer.step import mean_loss, update, uses_bf16
from lakh.trainer.world import World
from lakh.workloads.code.data import Batches, heldout_rows, open_tokens
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallel import check_supported, shard

__all__ = ["Outcome", "train"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: by its last step, or earlier because it was asked to stop."""

    step: int
    tokens: int
    loss: float
    heldout_loss: float
    checkpoint: str
    stopped_by: str = ""


def train(run: Run, run_dir: str | Path, *, faults: Sequence[Fault] = (), restart_reason: str = "") -> Outcome:
    """Train to the last step. Raises Interrupted after a checkpoint when SIGTERM or SIGINT asked for it."""
    with StopRequest().listen() as stop, World.join(run.train) as world, Log(run_dir, world.rank) as log:
        if restart_reason and world.rank == 0:
            log.write(Restarted(attempt=world.attempt, reason=restart_reason))
        started = time.monotonic()
        try:
            outcome = _Training(run, str(run_dir), world, log).to_the_end(stop, faults)
        except torch.OutOfMemoryError as error:
            found = f"does not fit into the memory of {world.device} ({str(error).partition('.')[0]})"
            raise InfeasiblePlan(
                f"rank {world.rank}", found, "make data.micro_batch smaller, or use more ranks"
            ) from None
        reason = f"stopped by {outcome.stopped_by}" if outcome.stopped_by else "last step done"
        log.write(RunEnded(step=outcome.step, reason=reason, seconds=time.monotonic() - started))
    if outcome.stopped_by:
        raise Interrupted(
            f"step {outcome.step}",
            f"stopped by {outcome.stopped_by} after the checkpoint {outcome.checkpoint}",
            f"go on with: lakh resume {run_dir}",
        )
    return outcome


class _Training:
    """The moving parts of one run on this rank."""

    def __init__(self, run: Run, run_dir: str, world: World, log: Log) -> None:
        self.run, self.run_dir, self.world, self.log = run, run_dir, world, log
        self.mesh = run.mesh.resolve(world.size)
        check_supported(self.mesh)
        run.accumulation(world.size)  # refuses a batch that cannot be split before anything is built
        self.train_tokens = open_tokens(run, "train")
        self.heldout_tokens = open_tokens(run, "heldout")
        self.model = self._build_model()
        self.optimizer = build_optimizer(self.model, run.optim)
        self.last_saved = ""
        self.step = self._restore()

    def to_the_end(self, stop: StopRequest, faults: Sequence[Fault]) -> Outcome:
        run, world = self.run, self.world
        self._say_started()
        batches = Batches(
            run, self.train_tokens, data_rank=world.rank, data_ranks=self.mesh.data_ranks, first_step=self.step
        )
        loss = heldout = float("nan")
        if self.step == 0:
            heldout = self._evaluate()
        stopped_by = ""
        try:
            while self.step < run.train.steps and not stopped_by:
                strike(faults, rank=world.rank, step=self.step, log=self.log)
                loss, stopped_by = self._one_step(batches, stop)
                if run.train.eval_every and self.step % run.train.eval_every == 0:
                    heldout = self._evaluate()
                due = run.checkpoint.every and self.step % run.checkpoint.every == 0
                if due or stopped_by or self.step == run.train.steps:
                    self._save()
        finally:
            batches.close()
        ended = self.step == run.train.steps
        if ended and not (run.train.eval_every and self.step % run.train.eval_every == 0):
            heldout = self._evaluate()
        tokens = self.step * run.tokens_per_step
        return Outcome(self.step, tokens, loss, heldout, self.last_saved, "" if ended else stopped_by)

    def _one_step(self, batches: Batches, stop: StopRequest) -> tuple[float, str]:
        """Returns the mean loss over all ranks, and why to stop ("" to go on): all ranks get the same answer."""
        began, waited = time.monotonic(), batches.wait_s
        micro_batches = batches.micro_batches(self.step, self.world.device)
        done = update(self.run, self.model, self.optimizer, micro_batches, self.step)
        loss, stops = self.world.sum(float(done.loss), float(stop.is_made))
        loss /= self.world.size
        self.step += 1
        seconds = time.monotonic() - began
        if not done.applied:
            reason = f"gradient norm is {float(done.grad_norm)}"
            self.log.write(StepSkipped(step=self.step, reason=reason))
        if self.world.rank == 0:
            self.log.write(
                StepDone(
                    step=self.step,
                    loss=loss,
                    lr=done.lr,
                    grad_norm=float(done.grad_norm),
                    tokens=self.step * self.run.tokens_per_step,
                    tokens_per_s=self.run.tokens_per_step / seconds,
                    step_s=seconds,
                    data_wait_s=batches.wait_s - waited,
                    mfu=self._mfu(seconds),
                )
            )
        return loss, (stop.signal or "another rank") if stops else ""

    def _mfu(self, seconds: float) -> float | None:
        """Causal-exact model FLOPs over the dense peak of the cluster's GPU; None on a CPU, which states no peak."""
        if self.world.device.type != "cuda":
            return None
        peak = self.run.cluster.gpu.dense_bf16_TFLOPs * 1e12 * self.world.size
        return self.run.tokens_per_step * self.run.model.flops_per_token(self.run.data.sequence) / seconds / peak

    @torch.no_grad()
    def _evaluate(self) -> float:
        began = time.monotonic()
        self.model.eval()
        total = count = 0.0
        rows_of_rank = heldout_rows(
            self.run, self.heldout_tokens, data_rank=self.world.rank, data_ranks=self.mesh.data_ranks
        )
        for rows, counted in rows_of_rank:
            rows = rows.to(self.world.device)
            losses = mean_loss(self.run, self.model, rows[:, :-1], rows[:, 1:], reduction="none")
            total += float(losses.view(len(rows), -1)[:counted].sum(dtype=torch.float64))
            count += counted * self.run.data.sequence
        total, count = self.world.sum(total, count)
        self.model.train()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a forward without backward leaves the root whole, and its shards out of sight
        sequences = int(count) // self.run.data.sequence
        if self.world.rank == 0:
            seconds = time.monotonic() - began
            self.log.write(Evaluated(step=self.step, loss=total / count, sequences=sequences, seconds=seconds))
        return total / count

    # --- state ---

    def _build_model(self) -> nn.Module:
        model = CodeModel(self.run.model)
        init_weights(model, self.run.seed)
        model.to(self.world.device)
        if self.world.size > 1:
            device_mesh = self.world.device_mesh(self.mesh, self.run.train.peer_timeout_s)
            shard(model, device_mesh, bf16=uses_bf16(self.run, self.world.device))
        return model

    def _restore(self) -> int:
        """Fill model and optimizer from the newest whole checkpoint; returns the step to begin with."""
        folder, passed = self.world.broadcast(checkpoint.newest_usable(self.run_dir) if self.world.rank == 0 else None)
        for error in passed if self.world.rank == 0 else ():
            self.log.write(CheckpointSkipped(path=error.where, reason=error.found))
        if folder is None:
            if passed:
                raise CorruptCheckpoint(self.run_dir, f"no whole checkpoint is left; {passed[0]}", "train anew")
            return 0
        manifest = checkpoint.load(folder, named_state(self.model, self.optimizer))
        if manifest.data_sha256 != self.train_tokens.fingerprint:
            raise UserError(
                self.run.data.tokens,
                "holds other data than the run was started with (fingerprint differs)",
                "point data.tokens to the shards it was started with, or start a new run",
            )
        if self.world.rank == 0:
            for path, before, after in config.diff(checkpoint.read_run(folder), self.run):
                self.log.write(SettingChanged(step=manifest.step, path=path, before=before, after=after))
        self.last_saved = folder
        return manifest.step

    def _save(self) -> None:
        began = time.monotonic()
        folder = storage.join(self.run_dir, "checkpoints", checkpoint.folder_name(self.step))
        manifest = checkpoint.save(
            folder,
            named_state(self.model, self.optimizer),
            step=self.step,
            sequence_index=self.step * self.run.data.batch,
            run_sha256=config.fingerprint(self.run),
            data_sha256=self.train_tokens.fingerprint,
            attachments={
                "run.toml": config.to_toml(self.run).encode(),
                "tokenizer.json": storage.read_bytes(self.train_tokens.tokenizer_path),
            },
            rank=self.world.rank,
            world=self.world.size,
            gather=self.world.gather,
        )
        self.last_saved = folder
        if manifest is not None:
            seconds = time.monotonic() - began
            self.log.write(CheckpointSaved(step=self.step, path=folder, bytes=manifest.bytes, seconds=seconds))
            checkpoint.thin_out(self.run_dir, keep=self.run.checkpoint.keep)

    def _say_started(self) -> None:
        self.log.write(
            RunStarted(
                step=self.step,
                world=self.world.size,
                attempt=self.world.attempt,
                backend=self.world.backend if self.world.size > 1 else "none",
                device=str(self.world.device),
                parameters=self.run.model.parameters,
                sequence_index=self.step * self.run.data.batch,
                run_sha256=config.fingerprint(self.run),
                data_sha256=self.train_tokens.fingerprint,
            )
        )
