"""Capture a step as a CUDA graph. All graphs of one `GraphCapture` share a memory pool and a stream.

A step is a function that always uses the same tensors, because the graph holds their addresses. The graph must own all
of them, including cuBLAS's workspace: torch keeps one per stream, which other code can free (`torch.compile` with CUDA
graphs does). Without graphs (Triton's interpreter, tests) the function itself is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["TIMED_STEPS", "GraphCapture", "StepFunction"]

StepFunction = Callable[[], None]

TIMED_RUNS, TIMED_STEPS = 6, 8


class GraphCapture:
    def __init__(self, device: torch.device, *, use_graphs: bool = True) -> None:
        self.use_graphs = use_graphs
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device) if use_graphs else None

    def __call__(self, step: StepFunction, prepare: Callable[[], object] = lambda: None) -> StepFunction:
        """A function that replays the step; `prepare` runs before each warm-up run."""
        if not self.use_graphs:
            return step
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # compiles kernels, and lets libraries allocate their workspaces
                prepare()
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        _drop_workspaces()  # the graph allocates its own while it is captured
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        _drop_workspaces()  # so that nothing else writes to the graph's
        self._pool = self._pool or graph.pool()
        replay: StepFunction = graph.replay
        return replay

    def time_s(self, step: StepFunction, prepare: Callable[[], object] = lambda: None) -> float:
        """Seconds of TIMED_STEPS captured steps after `prepare`: the best of TIMED_RUNS."""
        replay = self(step, prepare)
        took_s = float("inf")
        for _ in range(TIMED_RUNS):
            prepare()
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(TIMED_STEPS):
                replay()
            torch.cuda.synchronize()
            took_s = min(took_s, time.perf_counter() - began_s)
        return took_s


def _drop_workspaces() -> None:
    """Make torch allocate new cuBLAS workspaces for all streams on next use."""
    torch._C._cuda_clearCublasWorkspaces()
