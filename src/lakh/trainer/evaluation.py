"""Evaluation during training: the workload's measurements on held-out data, and the user's hooks."""

from __future__ import annotations

import time

from torch import nn

from lakh.events import Evaluated, HookMetrics
from lakh.spec import Run, Training
from lakh.trainer.hooks import load_hook
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.workloads import Workload

__all__ = ["Evaluator"]


class Evaluator:
    def __init__(self, settings: Training, workload: Workload, world: World, events: EventWriter) -> None:
        self._settings, self._workload, self._world, self._events = settings, workload, world, events
        self._hooks = [load_hook(name) for name in settings.hooks]
        self.loss, self.step = float("nan"), -1
        """The last held-out loss, and its step."""

    def is_due(self, step: int) -> bool:
        return bool(self._settings.eval_every) and step % self._settings.eval_every == 0

    def evaluate(self, run: Run, step: int, model: nn.Module) -> None:
        """Compute the held-out loss and call the hooks, which get `run`. A collective."""
        began_s = time.monotonic()
        found = self._workload.evaluate(run, model)
        self.loss, self.step = found.loss, step
        if found.metrics:
            self._events.write(HookMetrics(step=step, hook=run.workload, values=found.metrics))
        for hook in self._hooks:
            values = hook.measure(run, step, model, self._world)
            self._events.write(HookMetrics(step=step, hook=hook.name, values=values))
        seconds = time.monotonic() - began_s
        self._events.write(Evaluated(step=step, loss=self.loss, sequences=found.sequences, seconds=seconds))
