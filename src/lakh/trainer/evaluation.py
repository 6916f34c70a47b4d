"""The mean loss on held-out documents, over all ranks of a mesh. A collective; every rank gets the same answer."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lakh.spec import Mesh, Run
from lakh.tokens.loading.stream import TokenSet
from lakh.trainer.launch.world import World
from lakh.trainer.step import loss_sum
from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.data import heldout_batches

__all__ = ["heldout_loss"]


@torch.no_grad()
def heldout_loss(run: Run, mesh: Mesh, model: nn.Module, world: World, tokens: TokenSet) -> tuple[float, int]:
    """(nats per token, sequences that were counted)."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    count = 0
    for batch, counted in heldout_batches(
        run, tokens, data_rank=mesh.data_rank(world.rank), data_ranks=mesh.data_ranks, device=world.device
    ):
        targets = batch.targets.clone()  # inputs and targets are views of the same rows
        targets[counted:] = IGNORED  # repeats that only keep the ranks in step
        total += loss_sum(model, dataclasses.replace(batch, targets=targets))
        count += counted * run.data.sequence
    loss_total, places = world.sum(float(total), float(count))
    model.train()
    if isinstance(model, FSDPModule):
        model.reshard()  # a forward without backward leaves the root whole, and its shards out of sight
    # Of the ranks that share a sequence all have counted it; of a pipeline's the last one alone knows its loss.
    return loss_total * mesh.pp / places, round(places / run.data.sequence * mesh.data_ranks / world.size)
