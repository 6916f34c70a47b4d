"""lakh's embedding operator beside FBGEMM's and torch's, on one CPU thread: lookup, backward and sparse update.

All systems get the same ids (Zipf, exponent 1.05, as click logs are) and the same gradient of the pooled embeddings.
CPU time is measured, so that other programs on the machine disturb less; systems alternate and the best round counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.dlrm.bars import EMBEDDING_BAG_ADAM, FBGEMM_ADAGRAD, with_bar
from bench.harness import BenchRow, Peer, alternate, best, log
from lakh.spec.embedding import EmbeddingTable
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags
from lakh.workloads.dlrm.embedding.jagged import JaggedBags

__all__ = ["FBGEMM", "OperatorShape", "bench_operators"]

FBGEMM = Peer("fbgemm", modules=("fbgemm_gpu",), install="docs/how-to/dlrm.md")
ZIPF = 1.05
LR = 0.01
Step = Callable[[], list[float]]


@dataclass(frozen=True)
class OperatorShape:
    tables: int = 8
    rows: int = 200_000
    width: int = 64
    batch: int = 2048
    pooling: int = 10

    def __str__(self) -> str:
        return f"{self.tables} x {self.rows} x {self.width}, batch {self.batch}, pooling {self.pooling}"


def bench_operators(shape: OperatorShape, rounds: int, with_fbgemm: bool) -> list[BenchRow]:
    """One row for each system and optimizer; `ratio` is the peer's time over lakh's with the matching optimizer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bags = _bags(shape)
        grad_BC = torch.randn(shape.batch, shape.tables * shape.width, generator=torch.Generator().manual_seed(1))
        systems: dict[str, Step] = {
            f"lakh {kind}": _lakh(shape, bags, grad_BC, kind) for kind in ("sgd", "rowwise-adagrad", "rowwise-adam")
        }
        if with_fbgemm:
            systems["fbgemm sgd"] = _fbgemm(shape, bags, grad_BC, "EXACT_SGD")
            systems["fbgemm rowwise-adagrad"] = _fbgemm(shape, bags, grad_BC, "EXACT_ROWWISE_ADAGRAD")
        systems["torch EmbeddingBag + Adagrad"] = _torch(shape, bags, grad_BC, torch.optim.Adagrad)
        systems["torch EmbeddingBag + SparseAdam"] = _torch(shape, bags, grad_BC, torch.optim.SparseAdam)
        found = alternate(systems, rounds, warmup=1, progress=log)
    finally:
        torch.set_num_threads(threads)
    times = {name: best(attempts.measured) for name, attempts in found.items()}
    return [_row(name, shape, times) for name in times]


MATCHING = {
    "fbgemm sgd": "lakh sgd",
    "fbgemm rowwise-adagrad": "lakh rowwise-adagrad",
    "torch EmbeddingBag + Adagrad": "lakh rowwise-adagrad",
    "torch EmbeddingBag + SparseAdam": "lakh rowwise-adam",
}

BARS = {"fbgemm rowwise-adagrad": FBGEMM_ADAGRAD, "torch EmbeddingBag + SparseAdam": EMBEDDING_BAG_ADAM}


def _row(name: str, shape: OperatorShape, times: dict[str, list[float]]) -> BenchRow:
    lookup_s, update_s = times[name]
    ours = times.get(MATCHING.get(name, ""))
    row: BenchRow = {
        "system": name,
        "what": f"{shape}: CPU ms per step",
        "value": 1e3 * (lookup_s + update_s),
        "ratio": (lookup_s + update_s) / sum(ours) if ours else None,
        "lookup_ms": 1e3 * lookup_s,
        "update_ms": 1e3 * update_s,
    }
    return with_bar(row, BARS.get(name))


def _bags(shape: OperatorShape) -> JaggedBags:
    random = np.random.default_rng(0)
    share = 1 / np.arange(1, shape.rows + 1) ** ZIPF
    share /= share.sum()
    count = shape.batch * shape.pooling
    ids = [random.permutation(shape.rows)[random.choice(shape.rows, count, p=share)] for _ in range(shape.tables)]
    lengths_FB = torch.full((shape.tables, shape.batch), shape.pooling)
    return JaggedBags.of_lengths(torch.from_numpy(np.concatenate(ids)), lengths_FB)


def _measured(look_up: Callable[[], Tensor], update: Callable[[Tensor], None]) -> Step:
    def step() -> list[float]:
        began = time.process_time()
        out_BC = look_up()
        middle = time.process_time()
        update(out_BC)
        return [middle - began, time.process_time() - middle]

    return step


def _lakh(shape: OperatorShape, bags: JaggedBags, grad_BC: Tensor, kind: Any) -> Step:
    tables = [
        EmbeddingTable(name=f"t{i}", rows=shape.rows, width=shape.width, pooling=shape.pooling, optimizer=kind)
        for i in range(shape.tables)
    ]
    module = EmbeddingBags(tables, seed=1)

    def update(out_BC: Tensor) -> None:
        out_BC.backward(grad_BC)
        module.step(LR)

    return _measured(lambda: module(bags), update)


def _fbgemm(shape: OperatorShape, bags: JaggedBags, grad_BC: Tensor, optimizer: str) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.rows, shape.width, EmbeddingLocation.HOST, ComputeDevice.CPU)] * shape.tables,
        optimizer=EmbOptimType[optimizer],
        learning_rate=LR,
    )
    return _measured(lambda: module(bags.ids, bags.offsets), lambda out_BC: out_BC.backward(grad_BC))


def _torch(shape: OperatorShape, bags: JaggedBags, grad_BC: Tensor, optimizer_class: Any) -> Step:
    modules = [torch.nn.EmbeddingBag(shape.rows, shape.width, mode="sum", sparse=True) for _ in range(shape.tables)]
    optimizer = optimizer_class([module.weight for module in modules], lr=LR)
    inputs = [bags.select(i, i + 1) for i in range(shape.tables)]

    def look_up() -> Tensor:
        pairs = zip(modules, inputs, strict=True)
        return torch.cat([module(one.ids, one.offsets[:-1]) for module, one in pairs], dim=1)

    def update(out_BC: Tensor) -> None:
        optimizer.zero_grad()
        out_BC.backward(grad_BC)
        optimizer.step()

    return _measured(look_up, update)
