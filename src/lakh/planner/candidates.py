"""All layouts that a model, a batch and a number of GPUs allow, as one Layout of arrays.

Every combination of tensor, pipeline, context and expert parallelism, micro-batch, interleaving, schedule,
recomputation, sharding and offload that divides. Knows no hardware; what does not divide is counted with its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from lakh.planner.layout import FULL, NONE, SELECTIVE, Layout
from lakh.planner.shape import Array, Shape

__all__ = ["Limits", "candidates", "single"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the answer must respect."""

    batch: int
    sequence: int
    gpus: tuple[int, ...]
    tokens: float | None = None
    """Of the whole run; needed for a deadline and for its cost."""
    days: float | None = None
    max_tp: int = 16
    max_pp: int = 128
    max_cp: int = 16
    max_micro_batch: int = 64
    low_precision: float = 0.0
    graphed: float = 0.0
    offload: bool = True
    trainable: bool = False
    """Only what `lakh train` runs: FSDP2 with float32 masters, 1F1B or two chunks, degrees that divide the model."""


def divisors(number: int, up_to: int) -> list[int]:
    return [n for n in range(1, min(number, up_to) + 1) if number % n == 0]


def candidates(shape: Shape, limits: Limits) -> tuple[Layout, Counter[str]]:
    """All layouts that divide, as one Layout of arrays, and how many combinations did not divide."""
    columns: list[Array] = []
    refused: Counter[str] = Counter()
    layers, heads, experts = int(shape.layers), int(shape.heads), int(np.max(shape.experts))
    if limits.trainable:
        heads = math.gcd(int(shape.kv_heads), int(shape.ffn), int(shape.vocab))
    stages = [n for n in range(1, min(layers, limits.max_pp) + 1) if layers % n == 0 or _uneven(layers, n)]
    if limits.trainable:
        stages = [n for n in stages if layers % n == 0 and (n == 1 or not shape.tied)]
    for gpus in limits.gpus:
        for tp in divisors(heads, limits.max_tp):
            for pp in stages:
                for cp in [
                    n for n in (1, 2, 4, 8, 16) if (n <= limits.max_cp and limits.sequence % (2 * n) == 0) or n == 1
                ]:
                    group = tp * pp * cp
                    if gpus % group:
                        refused["tp x pp x cp does not divide the GPUs"] += 1
                        continue
                    if limits.batch % (gpus // group):
                        refused["the batch does not divide over the data ranks"] += 1
                        continue
                    columns.append(_inner(limits, layers, experts, gpus, tp, pp, cp))
    if not columns:
        return _as_layout(np.zeros((len(FIELDS), 0)), limits), refused
    layouts = _as_layout(np.concatenate(columns, axis=1), limits)
    if limits.trainable:
        runs = _is_run_by_the_trainer(layouts)
        refused["the trainer needs a micro-batch per stage, whole rounds of them, and tokens that tp divides"] += int(
            (~runs).sum()
        )
        layouts = layouts.take(runs)
    return layouts, refused


def _is_run_by_the_trainer(layouts: Layout) -> Array:
    """What the trainer's own check of a run asks of pipelines and tensor ranks."""
    enough = layouts.micro_batches >= layouts.pp
    whole_rounds = (layouts.chunks == 1) | (layouts.micro_batches % layouts.pp == 0)
    return enough & whole_rounds & ((layouts.sequence / layouts.cp) % layouts.tp == 0)


FIELDS = (
    "gpus", "tp", "pp", "cp", "ep", "micro_batch", "chunks", "zero_bubble", "run_ahead", "recompute", "zero1", "zero2",
    "shard", "offload", "expert_overlap", "pp_inside",
)  # fmt: skip


def _uneven(layers: int, stages: int) -> bool:
    """Stages that leave less than a tenth of a stage idle are worth a look: 126 layers on 16 stages."""
    return math.ceil(layers / stages) * stages <= 1.1 * layers and stages in (2, 4, 8, 16, 32, 64)


def _inner(limits: Limits, layers: int, experts: int, gpus: int, tp: int, pp: int, cp: int) -> Array:
    """All choices inside one (gpus, tp, pp, cp)."""
    ranks = gpus // (tp * pp * cp)
    data = ranks * cp
    sizes = divisors(limits.batch // ranks, limits.max_micro_batch)
    per_stage = layers // pp
    schedules = [(1.0, 0.0, 2.0)]  # chunks, zero bubble, chunks ahead
    if pp > 1 and not limits.trainable:
        several = [float(n) for n in divisors(per_stage, 16) if n > 1]
        schedules += [(1.0, 1.0, 2.0), *((n, 0.0, 2.0) for n in several), *((n, 0.0, 1.0) for n in several)]
    elif pp > 1 and layers % (2 * pp) == 0:
        schedules += [(2.0, 0.0, 2.0)]
    shardings = {(0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 1.0)}  # ZeRO-1, ZeRO-2, shards
    shardings |= {(0.0, 0.0, float(n)) for n in divisors(data, data) if n > 1 and (n & (n - 1) == 0 or n == data)}
    if limits.trainable:
        shardings = {(0.0, 0.0, float(n)) for n in divisors(data, data) if n % cp == 0 or n == 1}
    holders = data * tp  # whole experts are spread over tensor ranks too
    experts_over = [float(n) for n in divisors(experts, holders)] if experts else [1.0]
    experts_over = [n for n in experts_over if holders % int(n) == 0] or [1.0]
    how_scheduled, how_sharded = np.array(schedules).T, np.array(sorted(shardings)).T
    axes = [
        np.array(experts_over),
        np.array(sizes, dtype=float),
        np.arange(how_scheduled.shape[1]),
        np.array([NONE, SELECTIVE, FULL], dtype=float),
        np.arange(how_sharded.shape[1]),
        np.array([0.0, 1.0] if limits.offload and not limits.trainable else [0.0]),
        np.array([0.0, 1.0] if experts and not limits.trainable else [0.0]),
        np.array([0.0, 1.0] if pp > 1 and ranks > 1 and not limits.trainable else [0.0]),
    ]
    ep, size, schedule, recompute, sharding, offload, expert_overlap, inside = (
        column.ravel() for column in np.meshgrid(*axes, indexing="ij")
    )
    of_schedule, of_sharding = how_scheduled[:, schedule.astype(int)], how_sharded[:, sharding.astype(int)]
    outer = (np.full(ep.size, float(value)) for value in (gpus, tp, pp, cp))
    columns = [*outer, ep, size, *of_schedule, recompute, *of_sharding, offload, expert_overlap, inside]
    table = np.array(columns, dtype=np.float32)  # whole numbers below 2**24: exact, and half the memory
    return table[:, (expert_overlap == 0) | (ep > 1)]


def _as_layout(table: Array, limits: Limits) -> Layout:
    columns = {name: table[i] for i, name in enumerate(FIELDS)}
    own = {"weight_bytes": 4.0, "optimizer_bytes": 8.0} if limits.trainable else {}
    return Layout(
        sequence=float(limits.sequence),
        batch=float(limits.batch),
        sequence_parallel=(columns["tp"] > 1).astype(float),
        tensor_overlap=float(not limits.trainable),  # it takes no memory: the program has it or not
        low_precision=limits.low_precision,
        graphed=limits.graphed,
        gradient_bytes=4.0,
        **own,
        **columns,
    )


def single(layouts: Layout, i: int) -> Layout:
    """One of the layouts of an array of them, in plain numbers."""
    one = layouts.take(np.array([i]))
    return replace(one, **{name: float(getattr(one, name)[0]) for name in (*FIELDS, "sequence_parallel")})
