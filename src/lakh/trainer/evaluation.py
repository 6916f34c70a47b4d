"""Evaluation during training: the mean loss on held-out documents, and the user's hooks."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lakh.events import Evaluated, HookMetrics
from lakh.spec import Data, Mesh, Run, Training
from lakh.tokens.dataset.token_set import TokenSet
from lakh.trainer.hooks import load_hook
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.step import loss_sum
from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.data import heldout_batches

__all__ = ["Evaluator"]


class Evaluator:
    def __init__(self, settings: Training, mesh: Mesh, world: World, heldout: TokenSet, events: EventWriter) -> None:
        self._settings, self._mesh, self._world = settings, mesh, world
        self._heldout, self._events = heldout, events
        self._hooks = [load_hook(name) for name in settings.hooks]
        self.loss, self.step = float("nan"), -1
        """The last held-out loss, and its step."""

    def is_due(self, step: int) -> bool:
        return bool(self._settings.eval_every) and step % self._settings.eval_every == 0

    def evaluate(self, run: Run, step: int, model: nn.Module) -> None:
        """Compute the held-out loss and call the hooks, which get `run`. A collective."""
        began_s = time.monotonic()
        self.loss, sequences = self._heldout_loss(run.data, model)
        self.step = step
        for hook in self._hooks:
            values = hook.measure(run, step, model, self._world)
            self._events.write(HookMetrics(step=step, hook=hook.name, values=values))
        seconds = time.monotonic() - began_s
        self._events.write(Evaluated(step=step, loss=self.loss, sequences=sequences, seconds=seconds))

    @torch.no_grad()
    def _heldout_loss(self, data: Data, model: nn.Module) -> tuple[float, int]:
        """(nats per token, number of sequences), the same on every rank."""
        mesh, world = self._mesh, self._world
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        count = 0
        for batch, counted in heldout_batches(
            data,
            self._heldout,
            sequences=self._settings.eval_sequences,
            data_rank=mesh.data_rank(world.rank),
            data_ranks=mesh.data_ranks,
            device=world.device,
        ):
            targets = batch.targets.clone()  # inputs and targets are views of the same tensor
            targets[counted:] = IGNORED  # repeated sequences that give every rank the same number of batches
            total += loss_sum(model, dataclasses.replace(batch, targets=targets))
            count += counted * data.sequence
        loss_total, positions = world.sum(float(total), float(count))
        model.train()
        if isinstance(model, FSDPModule):
            model.reshard()  # a forward without backward leaves the root unsharded
        # All ranks that share a sequence have counted it; in a pipeline only the last stage has its loss.
        return loss_total * mesh.pp / positions, round(positions / data.sequence * mesh.data_ranks / world.size)
