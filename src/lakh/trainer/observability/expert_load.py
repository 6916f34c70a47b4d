"""The load of the experts as events: how unevenly the router spread the tokens of the last steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lakh.events import ExpertLoad
from lakh.spec import Model
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.workloads.code.model import Block

__all__ = ["ExpertLoadReport"]

EVERY_STEPS = 10
IDLE = 0.1
"""An expert with less than this part of the mean load counts as idle."""


class ExpertLoadReport:
    def __init__(self, model: nn.Module, spec: Model, world: World, writer: EventWriter) -> None:
        self._world, self._writer, self._layers = world, writer, spec.layers
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        self._loads = {block.layer: block.load for block in blocks if block.load is not None}
        self._experts = spec.num_experts

    def after_step(self, step: int) -> None:
        """Every few steps, sum the loads of all ranks and report them. A collective."""
        if not self._experts or step % EVERY_STEPS:
            return
        total = torch.zeros(self._layers, self._experts, device=self._world.device)
        for layer, load in self._loads.items():  # a pipeline stage has only its own layers
            total[layer] = load
            load.zero_()
        if self._world.size > 1:
            dist.all_reduce(total)
        counted = total[total.sum(1) > 0]  # a dense layer has no load
        if len(counted) and self._world.rank == 0:
            relative = counted / counted.mean(1, keepdim=True)
            layers = [round(value, 3) for value in relative.amax(1).tolist()]
            idle = int((relative < IDLE).sum())
            self._writer.write(ExpertLoad(step=step, busiest=max(layers), layers=layers, idle=idle))
