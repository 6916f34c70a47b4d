"""The forward and backward pass of a micro-batch, recorded once as a CUDA graph and replayed: for small models.

A small model's kernels end sooner than Python can start the next ones, and the GPU waits. A replay starts all of them
at once. What it costs: inputs are copied to where the recording reads them, gradients stay where the recording writes
them, and the memory of the pass is kept for the graph alone.

Only where shapes never change and one process has the whole model: packed documents, and models that are cut up over
ranks, take the plain way. `decide_cuda_graphs` decides, and says why.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec import Run
from lakh.workloads.code.batch import Batch

__all__ = ["GraphedPass", "decide_cuda_graphs"]

WARM_UP_PASSES = 3  # compiles, and lets libraries choose their kernels: neither can be recorded
BUSY_FLOPS_PER_LAYER = 0.9e12
"""Of a micro-batch: above, the GPU works longer on a layer than Python takes to start its kernels. Python took 2.2 ms
for each of 6 layers and their part of the step (H200, 2026-11-15, 13.1 ms where a replay took 2.4); an H200 does some
400 TFLOP/s."""

Pass = Callable[[nn.Module, Batch, float | Tensor], Tensor]
"""Forward and backward: leaves gradients, returns the loss."""


def decide_cuda_graphs(run: Run, *, device: str, world: int) -> tuple[bool, str]:
    """Whether passes are recorded, and the reason. Refuses where they were asked for and cannot be."""
    records, reason = _choose(run, device, world)
    if run.train.graphs == "on" and not records:
        raise UserError("train.graphs = on", reason, 'set train.graphs = "auto"')
    return records, reason


def _choose(run: Run, device: str, world: int) -> tuple[bool, str]:
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
    flops = run.data.micro_batch * run.data.sequence * run.model.flops_per_token(run.data.sequence) / run.model.layers
    if flops > BUSY_FLOPS_PER_LAYER:
        return False, f"{flops / 1e12:.1f} TFLOP a layer keep the GPU busy while Python starts the next kernels"
    return True, f"{flops / 1e12:.2f} TFLOP a layer end before Python has started the next kernels"


class GraphedPass:
    """A pass that is recorded at its first call, for that micro-batch's shape; another shape takes the plain way.

    Gradients are added to those that are there, where they are: they are zeroed, not dropped, between steps.
    """

    def __init__(self, plain: Pass) -> None:
        self._plain = plain
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, model: nn.Module, batch: Batch, scale: float | Tensor) -> Tensor:
        if self._graph is None:
            self._record(model, batch, scale)
        if batch.inputs.shape != self._batch.inputs.shape or batch.cu_seqlens is not None:
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._plain(model, self._batch, self._scale)
        self._graph = graph
        torch._foreach_copy_(_gradients(model), before)  # what the warm-up has added goes again


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
