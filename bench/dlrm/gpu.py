"""Embedding tables on a GPU: the share of the measured copy bandwidth that lookups and exact updates reach.

Bytes: a lookup reads each looked-up row and writes each pooled embedding; an update reads the gradient of the bag of
each lookup, and reads and writes each touched row and its state. The time of an update includes the sort. Ids follow
Zipf's law (exponent 1.05) in random places of the tables, as in click logs. Rows that a cache holds make the share
larger, up to more than 1.

Updates from one state are also repeated, and their results compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.dlrm.bars import GPU_LOOKUP, GPU_UPDATE, with_bar
from bench.harness import BenchRow, log
from lakh.spec.embedding import EmbeddingTable, TableSlice
from lakh.workloads.dlrm.embedding.gpu_tables import GpuTables
from lakh.workloads.dlrm.embedding.jagged import JaggedBags

__all__ = ["bench_gpu"]

ZIPF, COPY_BYTES, WARM_UP, REPEATS = 1.05, 4 << 30, 3, 100
BARS = {"lookup": GPU_LOOKUP, "exact update, row-wise AdaGrad": GPU_UPDATE}


@dataclass(frozen=True)
class GpuShape:
    tables: int
    rows: int
    widths: tuple[int, ...]
    """Of the tables in turn."""
    batch: int
    pooling: int
    zipf: bool

    def __str__(self) -> str:
        ids, widths = "Zipf" if self.zipf else "uniform", " and ".join(map(str, self.widths))
        return f"{self.tables} x {self.rows:,} x {widths}, batch {self.batch}, pooling {self.pooling}, {ids} ids"

    def width(self, table: int) -> int:
        return self.widths[table % len(self.widths)]


SHAPES = (
    GpuShape(26, 1_000_000, (128,), 8192, 10, zipf=False),
    GpuShape(26, 1_000_000, (128,), 8192, 10, zipf=True),
    GpuShape(8, 4_000_000, (64,), 16384, 20, zipf=False),
    GpuShape(26, 1_000_000, (128, 64), 8192, 10, zipf=True),
)


def bench_gpu(rounds: int) -> list[BenchRow]:
    device = torch.device("cuda")
    copy_GBps = 2 * COPY_BYTES / _copy_s(device, rounds) / 1e9
    rows: list[BenchRow] = [{"system": "torch", "what": "copy of 4 GiB, GB/s", "value": copy_GBps, "ratio": None}]
    for shape in SHAPES:
        log(f"GPU: {shape}")
        for name, (bytes_moved, seconds) in _measure(shape, rounds, device).items():
            speed = bytes_moved / seconds / 1e9
            what = f"{name}, {shape}: GB/s, ratio to the copy"
            row: BenchRow = {"system": "lakh", "what": what, "value": speed, "ratio": speed / copy_GBps}
            rows.append(with_bar({**row, "ms": 1e3 * seconds}, BARS[name]))
        what = f"results of {REPEATS} updates from one state that differ from the first, {shape}"
        rows.append({"system": "lakh", "what": what, "value": _count_differences(shape, device), "ratio": None})
    return rows


def _copy_s(device: torch.device, rounds: int) -> float:
    source = torch.empty(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), rounds)


def _measure(shape: GpuShape, rounds: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """(bytes, seconds) of a lookup and of an update."""
    module, bags = _module(shape, device), _bags(shape, device)
    grad_BC = torch.randn(shape.batch, module.columns, device=device)
    forward_bytes = backward_bytes = 0
    for table, ids in enumerate(bags.ids.chunk(shape.tables)):
        row_bytes = 4 * shape.width(table)
        forward_bytes += len(ids) * (row_bytes + 8) + shape.batch * row_bytes
        backward_bytes += len(ids) * (row_bytes + 8) + len(ids.unique()) * (2 * row_bytes + 8)

    def step() -> None:
        module.keep_gradient(bags, grad_BC)
        module.step(0.01)

    return {
        "lookup": (forward_bytes, _seconds(lambda: module.lookup(bags), rounds)),
        "exact update, row-wise AdaGrad": (backward_bytes, _seconds(step, rounds)),
    }


def _count_differences(shape: GpuShape, device: torch.device) -> int:
    module, bags = _module(shape, device), _bags(shape, device)
    grad_BC = torch.randn(shape.batch, module.columns, device=device)
    tensors = [held.local for held in module.held_tensors().values()]
    before, different = [tensor.clone() for tensor in tensors], 0
    first: list[torch.Tensor] = []
    for _ in range(REPEATS):
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        module.keep_gradient(bags, grad_BC)
        module.step(0.01)
        first = first or [tensor.clone() for tensor in tensors]
        different += not all(map(torch.equal, first, tensors))
    return different


def _module(shape: GpuShape, device: torch.device) -> GpuTables:
    tables = [EmbeddingTable(name=f"t{i}", rows=shape.rows, width=shape.width(i)) for i in range(shape.tables)]
    module = GpuTables([TableSlice.whole(table) for table in tables], seed=None, device=device)
    for (_, kind), held in module.held_tensors().items():
        if kind == "weights":
            held.local.uniform_(-0.01, 0.01)
    return module


def _bags(shape: GpuShape, device: torch.device) -> JaggedBags:
    random = np.random.default_rng(1)
    count = shape.tables * shape.batch * shape.pooling
    if shape.zipf:
        ids = random.permutation(shape.rows)[(random.zipf(ZIPF, count) - 1) % shape.rows]
    else:
        ids = random.integers(0, shape.rows, count)
    lengths = torch.full((shape.tables, shape.batch), shape.pooling)
    return JaggedBags.of_lengths(torch.from_numpy(ids), lengths).to(device)


def _seconds(work: Callable[[], object], rounds: int) -> float:
    """The best of several rounds of ten calls."""
    for _ in range(WARM_UP):
        work()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e4)
    return min(found)
