"""The forward and backward pass of a micro-batch, recorded once as a CUDA graph and replayed: for small models.

A small model's kernels end sooner than Python can start the next ones, and the GPU waits. A replay starts all of them
at once. What it costs: inputs are copied to where the recording reads them, gradients stay where the recording writes
them, and the memory of the pass is kept for the graph alone.

Only where shapes never change and one process has the whole model: packed documents, and models that are cut up over
ranks, take the plain way. `choose_graphs` decides, and says why.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lakh.spec import Run
from lakh.workloads.code.batch import Batch

__all__ = ["Graphed", "choose_graphs"]

WARM_UP_PASSES = 3  # compiles, and lets libraries choose their kernels: neither can be recorded
BUSY_FLOPS = 6e12
"""Of a micro-batch: above, the GPU works for some 15 ms on it, and Python is ahead of it anyway."""

Pass = Callable[[nn.Module, Batch, float | Tensor], Tensor]
"""Forward and backward: leaves gradients, returns the loss."""


def choose_graphs(run: Run, *, device: str, world: int) -> tuple[bool, str]:
    """Whether passes are recorded, and the reason."""
    if run.train.graphs == "off":
        return False, "switched off"
    if device != "cuda":
        return False, f"there are none on {device}"
    if world > 1:
        return False, "collectives of several ranks are not recorded"
    if run.data.document_mask:
        return False, "packed documents change shapes from batch to batch"
    if run.train.graphs == "on":
        return True, "asked for"
    flops = run.data.micro_batch * run.data.sequence * run.model.flops_per_token(run.data.sequence)
    if flops > BUSY_FLOPS:
        return (
            False,
            f"{flops / 1e12:.0f} TFLOP of a micro-batch keep the GPU busy while Python starts the next kernels",
        )
    return True, f"{flops / 1e12:.2f} TFLOP of a micro-batch end before Python has started the next kernels"


class Graphed:
    """A pass that is recorded at its first call, for that micro-batch's shape; another shape takes the plain way.

    `adds`: gradients are added to those that are there, as a step of several micro-batches needs; else they take their
    place, which spares a step the zeroing and the adding: two reads and two writes of every gradient.
    """

    def __init__(self, plain: Pass, *, adds: bool) -> None:
        self.adds = adds
        self._plain = plain
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients ready for the first pass of a step."""
        if self.adds:
            optimizer.zero_grad(set_to_none=False)  # a recording adds to them where they are
        elif self._graph is None:
            optimizer.zero_grad(set_to_none=True)

    def __call__(self, model: nn.Module, batch: Batch, scale: float | Tensor) -> Tensor:
        if self._graph is None:
            self._record(model, batch, scale)
        if batch.inputs.shape != self._batch.inputs.shape or batch.cu_seqlens is not None:
            if not self.adds:
                torch._foreach_zero_(_gradients(model))
            return self._plain(model, batch, scale)
        self._fill(batch, scale)
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _fill(self, batch: Batch, scale: float | Tensor) -> None:
        self._batch.inputs.copy_(batch.inputs)
        self._batch.targets.copy_(batch.targets)
        self._scale.fill_(scale)

    def _record(self, model: nn.Module, batch: Batch, scale: float | Tensor) -> None:
        device = batch.inputs.device
        self._batch = Batch(batch.inputs.clone(), batch.targets.clone())
        self._scale = torch.zeros((), device=device)
        self._fill(batch, scale)
        before: list[Tensor] = []
        if self.adds:
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            before = [gradient.clone() for gradient in _gradients(model)]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_PASSES):
                self._plain(model, self._batch, self._scale)
        torch.cuda.current_stream().wait_stream(aside)
        if not self.adds:
            model.zero_grad(set_to_none=True)  # where there are none, the recording makes its own and keeps them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._plain(model, self._batch, self._scale)
        self._graph = graph
        if self.adds:
            torch._foreach_copy_(_gradients(model), before)  # what the warm-up has added goes again


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
