"""All execution plans that a model, a batch and a number of GPUs allow, as one ExecutionPlan of arrays.

Every combination of tensor, pipeline, context and expert parallelism, micro-batch, interleaving, schedule,
recomputation, sharding and offload that divides. Combinations that do not divide are counted with their reason.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from lakh.planner.execution_plan import FULL, NONE, SELECTIVE, ExecutionPlan
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["SearchConstraints", "candidate_plans", "divisors", "single_plan", "stage_counts"]


@dataclass(frozen=True, kw_only=True)
class SearchConstraints:
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
    cuda_graphs: float = 0.0
    offload: bool = True
    trainable: bool = False
    """Only plans that `lakh train` runs: FSDP2 with float32 masters, 1F1B or two chunks, degrees that divide the
    model."""


def divisors(number: int, up_to: int) -> list[int]:
    return [n for n in range(1, min(number, up_to) + 1) if number % n == 0]


def candidate_plans(model: Model, limits: SearchConstraints) -> tuple[ExecutionPlan, Counter[str]]:
    """All plans that divide, as one plan of arrays, and the number of refused combinations by reason."""
    columns: list[Array] = []
    refused: Counter[str] = Counter()
    heads = math.gcd(model.kv_heads, model.ffn, model.vocab) if limits.trainable else model.heads
    contexts = [n for n in (1, 2, 4, 8, 16) if n == 1 or (n <= limits.max_cp and limits.sequence % (2 * n) == 0)]
    for gpus in limits.gpus:
        for tp in divisors(heads, limits.max_tp):
            for pp in stage_counts(model, limits):
                for cp in contexts:
                    group = tp * pp * cp
                    if gpus % group:
                        refused["tp x pp x cp does not divide the GPUs"] += 1
                    elif limits.batch % (gpus // group):
                        refused["the batch does not divide over the data ranks"] += 1
                    else:
                        columns.append(_inner_choices(model, limits, gpus, tp, pp, cp))
    if not columns:
        return _as_plan(np.zeros((len(FIELDS), 0)), limits), refused
    plans = _as_plan(np.concatenate(columns, axis=1), limits)
    if limits.trainable:
        runs = _is_trainable(plans)
        reason = "the trainer needs a micro-batch per stage, whole rounds, and tp and ep that divide tokens and shards"
        refused[reason] += int((~runs).sum())
        plans = plans.take(runs)
    return plans, refused


def stage_counts(model: Model, limits: SearchConstraints) -> list[int]:
    """Pipeline sizes that divide the layers, or leave less than a tenth of a stage idle: 126 layers on 16 stages."""
    layers = model.layers
    counts = range(1, min(layers, limits.max_pp) + 1)
    if limits.trainable:
        return [n for n in counts if layers % n == 0 and (n == 1 or not model.tied)]
    nearly = {n for n in (2, 4, 8, 16, 32, 64) if math.ceil(layers / n) * n <= 1.1 * layers}
    return [n for n in counts if layers % n == 0 or n in nearly]


def _is_trainable(plans: ExecutionPlan) -> Array:
    """What spec/parallel_check.py requires of pipelines, tensor and expert ranks."""
    enough = plans.micro_batches >= plans.pp
    whole_rounds = (plans.chunks == 1) | (plans.micro_batches % plans.pp == 0)
    has_tokens = (plans.sequence / plans.cp) % plans.tp == 0
    shards = np.where(plans.shard > 1, plans.shard, plans.cp)
    return enough & whole_rounds & has_tokens & (shards % plans.ep == 0)


FIELDS = (
    "gpus", "tp", "pp", "cp", "ep", "micro_batch", "chunks", "zero_bubble", "chunks_ahead", "recompute", "zero",
    "shard", "offload", "expert_overlap", "pp_inside",
)  # fmt: skip


def _inner_choices(model: Model, limits: SearchConstraints, gpus: int, tp: int, pp: int, cp: int) -> Array:
    """All choices inside one (gpus, tp, pp, cp), one row per field."""
    ranks = gpus // (tp * pp * cp)
    data_ranks, experts = ranks * cp, model.num_experts
    schedules = [(1.0, 0.0, 2.0)]  # chunks, zero bubble, chunks ahead
    shardings = {(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)}  # ZeRO stage, shards
    if limits.trainable:
        if pp > 1 and model.layers % (2 * pp) == 0:
            schedules += [(2.0, 0.0, 2.0)]
        shardings = {(0.0, float(n)) for n in divisors(data_ranks, data_ranks) if n % cp == 0 or n == 1}
    else:
        if pp > 1:
            several = [float(n) for n in divisors(model.layers // pp, 16) if n > 1]
            schedules += [(1.0, 1.0, 2.0), *((n, 0.0, 2.0) for n in several), *((n, 0.0, 1.0) for n in several)]
        powers = [n for n in divisors(data_ranks, data_ranks) if n > 1 and (n & (n - 1) == 0 or n == data_ranks)]
        shardings |= {(0.0, float(n)) for n in powers}
    holders = data_ranks * (1 if limits.trainable else tp)  # whole experts are spread over tensor ranks too
    expert_ranks = [float(n) for n in divisors(experts, holders) if holders % n == 0] or [1.0]

    def switch(allowed: bool) -> Array:
        return np.array([0.0, 1.0] if allowed and not limits.trainable else [0.0])

    schedule_table, sharding_table = np.array(schedules).T, np.array(sorted(shardings)).T
    axes = [
        np.array(expert_ranks),
        np.array(divisors(limits.batch // ranks, limits.max_micro_batch), dtype=float),
        np.arange(len(schedules)),
        np.array([NONE, SELECTIVE, FULL], dtype=float),
        np.arange(len(shardings)),
        switch(limits.offload),
        switch(experts > 0),
        switch(pp > 1 and ranks > 1),
    ]
    ep, size, schedule, recompute, sharding, offload, expert_overlap, inside = (
        column.ravel() for column in np.meshgrid(*axes, indexing="ij")
    )
    outer = (np.full(ep.size, float(value)) for value in (gpus, tp, pp, cp))
    of_schedule, of_sharding = schedule_table[:, schedule.astype(int)], sharding_table[:, sharding.astype(int)]
    columns = [*outer, ep, size, *of_schedule, recompute, *of_sharding, offload, expert_overlap, inside]
    table = np.array(columns, dtype=np.float32)  # whole numbers below 2**24: exact, and half the memory
    return table[:, (expert_overlap == 0) | (ep > 1)]


def _as_plan(table: Array, limits: SearchConstraints) -> ExecutionPlan:
    columns = {name: table[i] for i, name in enumerate(FIELDS)}
    trained = {"weight_bytes": 4.0, "optimizer_bytes": 8.0, "whole_experts": 0.0, "node_dispatch": 0.0}
    program = {**trained, "gathered_dispatch": 1.0} if limits.trainable else {}
    return ExecutionPlan(
        sequence=float(limits.sequence),
        batch=float(limits.batch),
        sequence_parallel=(columns["tp"] > 1).astype(float),
        tensor_overlap=float(not limits.trainable),  # it takes no memory: the program has it or not
        low_precision=limits.low_precision,
        cuda_graphs=limits.cuda_graphs,
        gradient_bytes=4.0,
        **program,
        **columns,
    )


def single_plan(plans: ExecutionPlan, i: int) -> ExecutionPlan:
    """One plan of an array of plans, in plain numbers."""
    one = plans.take(np.array([i]))
    return replace(one, **{name: float(getattr(one, name)[0]) for name in (*FIELDS, "sequence_parallel")})
