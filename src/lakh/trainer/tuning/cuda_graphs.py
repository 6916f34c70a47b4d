"""CUDA graphs for small models: record the forward and backward pass of a micro-batch once and replay it.

The kernels of a small model end before Python has launched the next ones; a replay launches all of them at once. In
exchange, inputs are copied into the graph's buffers, gradients stay in place, and the pass keeps its memory.

Only for fixed shapes on one process: packed documents and sharded models run without graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec import Data, Model, Training
from lakh.trainer.step import Pass
from lakh.workloads.code.batch import Batch

__all__ = ["GraphedPass", "decide_cuda_graphs"]

WARM_UP_PASSES = 3  # compilation and kernel selection cannot be recorded
BUSY_FLOPS_PER_LAYER = 0.9e12
"""Of a micro-batch: above this, the GPU needs longer for a layer than Python to launch its kernels. Python took 2.2 ms
for each of 6 layers (H200, 2026-11-15: 13.1 ms per step, 2.4 with a replay); an H200 does about 400 TFLOP/s."""
BUSY_FLOPS_PER_ADAPTED_LAYER = 2.6e12
"""The same with low-rank adapters, whose small products are many: 6.5 ms for each of 24 layers (H200, 2026-11-17)."""


def decide_cuda_graphs(
    settings: Training, data: Data, model: Model, *, device: str, world: int, adapted: bool = False
) -> tuple[bool, str]:
    """Whether to use CUDA graphs, and the reason. Raises UserError if they are requested and not possible."""
    enabled, reason = _decide(settings, data, model, device, world, adapted)
    if settings.graphs == "on" and not enabled:
        raise UserError("train.graphs = on", reason, 'set train.graphs = "auto"')
    return enabled, reason


def _decide(settings: Training, data: Data, model: Model, device: str, world: int, adapted: bool) -> tuple[bool, str]:
    if settings.graphs == "off":
        return False, "disabled"
    if device != "cuda":
        return False, f"not available on {device}"
    if world > 1:
        return False, "collectives of several ranks cannot be recorded"
    if settings.reduce_dtype == "float64":
        return False, "gradients of each micro-batch are moved to sums in float64"
    if data.document_mask:
        return False, "packed documents change the shapes from batch to batch"
    if settings.graphs == "on":
        return True, "requested"
    token_flops = model.flops_per_token(data.sequence, frozen=adapted)
    flops = data.micro_batch * data.sequence * token_flops / model.layers
    if flops > (BUSY_FLOPS_PER_ADAPTED_LAYER if adapted else BUSY_FLOPS_PER_LAYER):
        return False, f"{flops / 1e12:.1f} TFLOP per layer keep the GPU busy while Python launches the next kernels"
    return True, f"{flops / 1e12:.2f} TFLOP per layer end before Python has launched the next kernels"


class GraphedPass:
    """A pass that is recorded at its first call; micro-batches of another shape run without the graph.

    The graph writes gradients to memory of its own, which become the parameters' gradients. Set them to None between
    steps; those of further micro-batches of a step are added to a copy.
    """

    def __init__(self, plain: Pass) -> None:
        self._plain = plain
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, model: nn.Module, batch: Batch, scale: float | Tensor) -> Tensor:
        if self._graph is None:
            self._record(model, batch, scale)
        if batch.inputs.shape != self._batch.inputs.shape or batch.documents is not None:
            return self._plain(model, batch, scale)
        self._fill(batch, scale)
        before = [self._held(parameter, gradient) for parameter, gradient in self._gradients.items()]
        assert self._graph is not None
        self._graph.replay()
        for (parameter, gradient), earlier in zip(self._gradients.items(), before, strict=True):
            parameter.grad = gradient if earlier is None else earlier
        added = [
            (earlier, new) for earlier, new in zip(before, self._gradients.values(), strict=True) if earlier is not None
        ]
        if added:
            torch._foreach_add_(*map(list, zip(*added, strict=True)))
        return self._loss.clone()

    @staticmethod
    def _held(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """The gradient before a replay, which overwrites `gradient`."""
        return parameter.grad.clone() if parameter.grad is gradient else parameter.grad

    def _fill(self, batch: Batch, scale: float | Tensor) -> None:
        self._batch.inputs.copy_(batch.inputs)
        self._batch.targets.copy_(batch.targets)
        self._scale.fill_(scale)

    def _record(self, model: nn.Module, batch: Batch, scale: float | Tensor) -> None:
        device = batch.inputs.device
        self._batch = Batch(batch.inputs.clone(), batch.targets.clone())
        self._scale = torch.zeros((), device=device)
        self._fill(batch, scale)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in trained]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UP_PASSES):
                model.zero_grad()
                self._plain(model, self._batch, self._scale)
            model.zero_grad()
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._plain(model, self._batch, self._scale)
        self._graph = graph
        self._gradients = {parameter: parameter.grad for parameter in trained if parameter.grad is not None}
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient
