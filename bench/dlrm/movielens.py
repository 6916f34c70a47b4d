"""DLRM and DCNv2 on MovieLens-100k: test AUC with lakh's tables and with torch's, over several seeds.

Both systems train the same network from the same initial weights on the same batches with the same optimizers: AdamW
for the dense layers, row-wise AdaGrad for the tables. torch's tables are EmbeddingBags with sparse gradients, and the
update is written with torch's operations. The AUC on the validation samples, measured after each epoch, chooses the
epoch whose test AUC counts. `seconds` is the training time until lakh's or torch's validation AUC reaches the lower one
of both systems' best, the mean over the seeds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from bench.harness import BenchRow, log
from lakh.spec.embedding import ClickNetwork, EmbeddingTable
from lakh.tokens.dataset.shuffle import ShuffleOrder
from lakh.workloads.dlrm.auc import area_under_curve
from lakh.workloads.dlrm.batch import ClickBatch
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.loss import click_loss
from lakh.workloads.dlrm.model import ClickModel
from lakh.workloads.dlrm.movielens import FEATURES, MovieLens

__all__ = ["bench_movielens"]

BATCH = 512
DENSE_LR = 1e-3
TABLE_LR = 0.02
EPS = 1e-8
NETWORKS: dict[str, Literal["dot", "cross"]] = {"DLRM": "dot", "DCNv2": "cross"}


class _TorchTables(nn.Module):
    """torch's EmbeddingBags with the initial weights of lakh's, and row-wise AdaGrad."""

    def __init__(self, tables: EmbeddingBags) -> None:
        super().__init__()
        weights = [tensor for name, tensor in tables.state_dict().items() if name.endswith(".weights")]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum", sparse=True) for weight in weights
        )
        self._squares = [torch.zeros(len(weight)) for weight in weights]

    def forward(self, bags: JaggedBags) -> Tensor:
        inputs = [bags.select(feature, feature + 1) for feature in range(len(self.bags))]
        pairs = zip(self.bags, inputs, strict=True)
        return torch.cat([module(one.ids, one.offsets[:-1]) for module, one in pairs], dim=1)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for weight, square in zip(self.parameters(), self._squares, strict=True):
            assert weight.grad is not None
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            square.index_add_(0, rows, values.square().mean(1))
            weight.index_add_(0, rows, values / (square[rows].sqrt() + EPS)[:, None], alpha=-lr)
            weight.grad = None


@dataclass(frozen=True)
class _Curve:
    seconds: list[float]
    """Of training, after each epoch."""
    validation: list[float]
    test: list[float]

    @property
    def chosen(self) -> float:
        """The test AUC of the epoch with the best validation AUC."""
        return self.test[max(range(len(self.test)), key=lambda epoch: self.validation[epoch])]

    def seconds_to(self, auc: float) -> float:
        return next(s for s, reached in zip(self.seconds, self.validation, strict=True) if reached >= auc)


def bench_movielens(source: str, epochs: int, seeds: int) -> list[BenchRow]:
    clicks = MovieLens(source)
    tables = [EmbeddingTable(name=name, rows=rows, width=16) for name, rows in zip(FEATURES, clicks.rows, strict=True)]
    rows: list[BenchRow] = []
    for name, interaction in NETWORKS.items():
        network = ClickNetwork(
            interaction=interaction, dense_features=2, bottom=(64,), top=(128, 64), cross_layers=2, cross_rank=32
        )
        curves: dict[str, list[_Curve]] = {"torch": [], "lakh": []}
        for seed in range(seeds):
            for system, found in curves.items():
                log(f"{system}: {name} on MovieLens-100k, seed {seed}")
                ours = EmbeddingBags(tables, seed=seed)
                used = ours if system == "lakh" else _TorchTables(ours)
                found.append(_train(ClickModel(network, tables, used, seed=seed), used.step, clicks, epochs, seed))
        rows += _rows(f"MovieLens-100k test AUC, {name}, {epochs} epochs, mean of {seeds} seeds", curves)
    return rows


def _rows(what: str, curves: dict[str, list[_Curve]]) -> list[BenchRow]:
    seconds: dict[str, list[float]] = {system: [] for system in curves}
    for pair in zip(*curves.values(), strict=True):
        goal = min(max(curve.validation) for curve in pair)
        for system, curve in zip(curves, pair, strict=True):
            seconds[system].append(curve.seconds_to(goal))
    mean_s = {system: statistics.mean(values) for system, values in seconds.items()}
    rows: list[BenchRow] = []
    for system, found in curves.items():
        aucs = [curve.chosen for curve in found]
        spread = statistics.stdev(aucs) if len(aucs) > 1 else 0.0
        ratio = mean_s["torch"] / mean_s["lakh"] if system == "lakh" else None
        facts = {"spread": spread, "seconds": mean_s[system]}
        rows.append({"system": system, "what": what, "value": statistics.mean(aucs), "ratio": ratio, **facts})
    return rows


def _train(
    model: ClickModel, step_tables: Callable[[float], None], clicks: MovieLens, epochs: int, seed: int
) -> _Curve:
    optimizer = torch.optim.AdamW(model.dense_parameters(), lr=DENSE_LR)
    train, validation = int(clicks.num_samples * 0.8), int(clicks.num_samples * 0.9)
    order = ShuffleOrder(train, seed)
    held = [_batch(clicks, np.arange(train, validation)), _batch(clicks, np.arange(validation, clicks.num_samples))]
    curve, seconds = _Curve([], [], []), 0.0
    for epoch in range(epochs):
        batches = [
            _batch(clicks, order.permute(np.arange(first, min(first + BATCH, (epoch + 1) * train))))
            for first in range(epoch * train, (epoch + 1) * train, BATCH)
        ]
        began = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            click_loss(model(batch), batch).backward()
            optimizer.step()
            step_tables(TABLE_LR)
        seconds += time.perf_counter() - began
        with torch.no_grad():
            aucs = [area_under_curve(model(part), part.labels_B) for part in held]
        curve.seconds.append(seconds)
        curve.validation.append(aucs[0])
        curve.test.append(aucs[1])
    return curve


def _batch(clicks: MovieLens, numbers: np.ndarray) -> ClickBatch:
    found = clicks.read(numbers)
    ids, lengths = torch.from_numpy(found.ids).long(), torch.from_numpy(found.lengths_FS).long()
    bags = JaggedBags.of_lengths(ids, lengths)
    return ClickBatch(bags, torch.from_numpy(found.dense_SN), torch.from_numpy(found.labels_S))
