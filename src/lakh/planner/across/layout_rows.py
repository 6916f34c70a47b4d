"""All layouts and schedules of one pipeline depth, as arrays: one row for each combination."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lakh.planner.execution_plan import FULL, NONE, SELECTIVE, ExecutionPlan
from lakh.planner.search.candidates import divisors
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["KINDS", "LayoutRows", "layout_rows"]

KINDS = ("gpipe", "1f1b", "1f1b-deep", "interleaved", "zb-h1", "zb-h2")
"""1f1b-deep is 1f1b with a deeper warm-up before slow boundaries."""
GPIPE, ONE_F_ONE_B, DEEP, INTERLEAVED, ZB_H1, ZB_H2 = range(len(KINDS))
MOST_TP, MOST_CHUNKS = 8, 8
MICRO_BATCHES = (1, 2, 4, 8)
LEAST_CONTEXT_TOKENS = 4096
"""Of one rank: shorter pieces of a sequence are not worth a ring."""


@dataclass(frozen=True)
class LayoutRows:
    stages: int
    tp: Array
    cp: Array
    ep: Array
    micro_batch: Array
    recompute: Array
    zero: Array
    """1 or 2; 3 is FSDP over the ranks of a stage in one site."""
    kind: Array
    """Index into KINDS."""
    chunks: Array

    @property
    def count(self) -> int:
        return len(self.tp)

    @property
    def rank_gpus(self) -> Array:
        """GPUs of one stage of one replica."""
        return self.tp * self.cp

    def take(self, index: Any) -> LayoutRows:
        """Some of the rows."""
        return LayoutRows(self.stages, *(getattr(self, f.name)[index] for f in fields(self) if f.name != "stages"))

    def plan(self, model: Model, sequence: int, replicas: Array, micro_batches: Array, warm_up: Array) -> ExecutionPlan:
        """The plan of one pipeline group, with `replicas` pipelines of `micro_batches` each."""
        is_sharded = self.zero == 3
        return ExecutionPlan(
            gpus=replicas * self.rank_gpus * self.stages,
            sequence=float(sequence),
            batch=replicas * micro_batches * self.micro_batch,
            micro_batch=self.micro_batch,
            tp=self.tp,
            pp=np.full(self.count, float(self.stages)),
            cp=self.cp,
            ep=self.ep,
            shard=np.where(is_sharded, replicas * self.cp, 1.0),
            zero=np.where(is_sharded, 0.0, self.zero),
            chunks=self.chunks,
            gpipe=(self.kind == GPIPE).astype(float),
            zero_bubble=(self.kind >= ZB_H1).astype(float),
            extra_warm_up=warm_up,
            recompute=self.recompute,
            sequence_parallel=(self.tp > 1).astype(float),
            tensor_overlap=1.0,
            gradient_bytes=4.0,
        )

    def describe(self, row: int) -> dict[str, object]:
        names = ("tp", "cp", "ep", "micro_batch", "chunks")
        shown: dict[str, object] = {name: int(getattr(self, name)[row]) for name in names}
        return {"pp": self.stages, **shown, "zero": int(self.zero[row]), "schedule": KINDS[int(self.kind[row])],
                "recompute": ("none", "selective", "full")[int(self.recompute[row])]}  # fmt: skip


def layout_rows(model: Model, sequence: int, batch: int, stages: int) -> LayoutRows:
    """Every combination of tensor, context and expert degrees, micro-batch, recomputation, sharding and schedule."""
    contexts = [n for n in (1, 2, 4, 8, 16) if n == 1 or sequence // n >= LEAST_CONTEXT_TOKENS]
    axes = [
        np.array([n for n in divisors(model.heads, MOST_TP) if n & (n - 1) == 0], dtype=float),
        np.array(contexts, dtype=float),
        np.array(_expert_degrees(model), dtype=float),
        np.array([n for n in MICRO_BATCHES if n <= batch], dtype=float),
        np.array([NONE, SELECTIVE, FULL], dtype=float),
        np.array([1.0, 2.0, 3.0]),
        np.arange(len(schedules := list(_schedules(model, stages)))),
    ]
    tp, cp, ep, size, recompute, zero, schedule = (part.ravel() for part in np.meshgrid(*axes, indexing="ij"))
    kind, chunks = np.array(schedules, dtype=float).T[:, schedule]
    return LayoutRows(stages, tp, cp, ep, size, recompute, zero, kind, chunks)


def _schedules(model: Model, stages: int) -> Iterator[tuple[int, int]]:
    """Kind and chunks."""
    if stages == 1:
        yield ONE_F_ONE_B, 1
        return
    yield from ((kind, 1) for kind in range(len(KINDS)) if kind != INTERLEAVED)
    yield from ((INTERLEAVED, n) for n in divisors(model.layers // stages, MOST_CHUNKS) if n > 1)


def _expert_degrees(model: Model) -> list[int]:
    if not model.num_experts:
        return [1]
    return [n for n in divisors(model.num_experts, 256) if n & (n - 1) == 0]
