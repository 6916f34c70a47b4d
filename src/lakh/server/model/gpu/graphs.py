"""Capturing a step as a graph. All graphs of one `GraphCapture` share a pool of memory and a stream.

A step is a function that always touches the same tensors: the graph knows their addresses. So it has to own all of
them, the scratch memory of the vendor's products included: torch keeps one for each stream, which others may give back
(`torch.compile` with graphs of its own does). Without graphs (Triton's interpreter, tests) the function itself is what
is called. Knows nothing of what a step does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GraphCapture", "Step"]

Step = Callable[[], None]


class GraphCapture:
    def __init__(self, device: torch.device, *, use_graphs: bool = True) -> None:
        self.use_graphs = use_graphs
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device) if use_graphs else None

    def __call__(self, step: Step, prepare: Callable[[], object] = lambda: None) -> Step:
        """What does the step from now on; `prepare` comes before each of the runs that warm it up."""
        if not self.use_graphs:
            return step
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # compiles kernels, and lets libraries allocate their workspaces
                prepare()
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        _forget_scratch()  # so that the graph's own is made while it is captured
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        _forget_scratch()  # and nobody else writes there
        self._pool = self._pool or graph.pool()
        replay: Step = graph.replay
        return replay


def _forget_scratch() -> None:
    """Torch's scratch memory for products, of all streams; whoever needs some next gets another."""
    torch._C._cuda_clearCublasWorkspaces()
