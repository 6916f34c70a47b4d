"""Pipeline parallelism: consecutive blocks on consecutive ranks, with torch's schedules of micro-batches.

    gpipe        all forward, then all backward
    1f1b         one forward, one backward: the same bubble, memory for only pp micro-batches
    interleaved  each rank holds two stages: half the bubble, twice the messages
    zero_bubble  interleaved, and weight gradients fill the bubble; not with data parallelism (spec/parallel_check.py)

With pp ranks and m micro-batches the bubble takes (pp - 1) / (m + pp - 1) of the time, half of that if interleaved.
Parameters keep the names they have in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lakh.spec.parallel_check import STAGES_PER_RANK
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.objective import PLAIN, Objective

__all__ = ["Pipeline", "split"]


SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
"""Classes of torch.distributed.pipelining."""


def split(build: Callable[[], CodeModel], *, schedule: str, rank: int, ranks: int) -> list[CodeModel]:
    """The stages of one rank, each a model with only its own blocks; `build()` makes the whole model."""
    stages = ranks * STAGES_PER_RANK[schedule]
    chunks = []
    for stage in range(rank, stages, ranks):
        model = build()
        size = model.spec.layers // stages
        for name in list(model.blocks):
            if int(name) // size != stage:
                del model.blocks[name]
        if stage > 0:
            model.embed = model.positions = None
        if stage < stages - 1:
            model.norm = model.head = None
            for name in model.architecture.final_parameters(model.spec):
                setattr(model, name, None)
        chunks.append(model)
    return chunks


class Pipeline(nn.Module):
    """The stages of this rank, and the schedule that runs them together with the other ranks."""

    def __init__(
        self,
        chunks: Sequence[CodeModel],
        *,
        schedule: str,
        group: dist.ProcessGroup,
        micro_batches: int,
        hidden_shape: tuple[int, int, int],
        token_shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        # Takes a second, as it imports torch.compile's front end: only ranks of a pipeline wait for it.
        from torch.distributed import pipelining

        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.stages = self.ranks * len(chunks)
        self.hidden_shape, self.dtype = hidden_shape, chunks[0].dtype or torch.float32
        hidden = torch.empty(hidden_shape, dtype=self.dtype, device="meta")
        tokens = torch.empty(token_shape, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta")
        parts = [
            pipelining.PipelineStage(
                chunk,
                stage,
                self.stages,
                device,
                input_args=tokens if stage == 0 else hidden.clone().requires_grad_(),
                output_args=loss if stage == self.stages - 1 else hidden.clone().requires_grad_(),
                group=group,
            )
            for stage, chunk in zip(range(self.rank, self.stages, self.ranks), chunks, strict=True)
        ]
        self._schedule = getattr(pipelining, SCHEDULES[schedule])(
            parts if STAGES_PER_RANK[schedule] > 1 else parts[0],
            n_microbatches=micro_batches,
            loss_fn=lambda loss, targets: loss,
            scale_grads=False,
        )
        self._parts = parts

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """With the names of the whole model."""
        for chunk in self.chunks:
            yield from chunk.named_parameters(*args, **kwargs)

    def run(
        self, batches: Sequence[Batch], scales: Sequence[float], *, objective: Objective = PLAIN, train: bool = True
    ) -> Tensor:
        """Forward, and backward with `train`; the summed loss on the rank of the last stage, 0 elsewhere."""
        kwargs = [
            {
                "positions_BT": batch.positions,
                "targets_BT": batch.targets,
                "documents": batch.documents,
                "scale": scale,
                "objective": objective,
            }
            for batch, scale in zip(batches, scales, strict=True)
        ]
        losses: list[Tensor | None] = []
        if not train:
            losses = [self._forward(batch, options) for batch, options in zip(batches, kwargs, strict=True)]
        else:
            for part in self._parts:
                part.has_backward = True
                part.clear_runtime_states()
            self._schedule._step_microbatches(
                arg_mbs=[(batch.inputs,) if self.rank == 0 else () for batch in batches],
                kwarg_mbs=kwargs,
                target_mbs=[batch.targets for batch in batches],
                losses=losses,
                return_outputs=False,
            )
        known = [loss.detach() for loss in losses if loss is not None]
        return torch.stack(known).sum() if known else torch.zeros((), device=self.device)

    def _forward(self, batch: Batch, options: dict[str, Any]) -> Tensor | None:
        """One micro-batch through all stages, without gradients; the loss on the rank of the last stage."""
        for stage in range(self.rank, self.stages, self.ranks):
            chunk = self.chunks[stage // self.ranks]
            x = batch.inputs
            if stage > 0:
                shape = (len(batch.inputs), *self.hidden_shape[1:])
                x = torch.empty(shape, dtype=self.dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=(stage - 1) % self.ranks)
            y = chunk(x, **options)
            if stage == self.stages - 1:
                return y
            dist.send(y.contiguous(), group=self.group, group_dst=(stage + 1) % self.ranks)
        return None
