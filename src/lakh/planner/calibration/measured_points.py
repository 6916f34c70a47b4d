"""Published measurements: a CSV of (configuration -> speed) rows, each converted to seconds per step.

Every source counts FLOPs in its own way, so a figure is first converted to seconds by its source's rule. What a source
does not state comes from published_sources.py. Rows that cannot be planned (no architecture, a figure for a whole run)
are excluded and counted with their reason.

Rows of one configuration share a `config` digest and always stay on the same side of a split.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lakh import config, storage
from lakh.errors import ConfigError, DataError, UserError
from lakh.planner.calibration import published_sources
from lakh.planner.calibration.published_sources import NoteFacts, RowSettings, gpu_data, low_precision
from lakh.planner.execution_plan import RECOMPUTE, ExecutionPlan
from lakh.planner.stacked import stacked
from lakh.spec.cluster import Cluster, Tier
from lakh.spec.gpu import Gpu, gpu_family
from lakh.spec.model import Model

__all__ = ["SHIPPED_POINTS", "Index", "MeasuredPoint", "MeasuredPoints", "read_points", "stack_points"]

Index: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
Row: TypeAlias = Mapping[str, str]

CONFIGURATION = (
    "gpu", "n_gpus", "hidden", "layers", "heads", "kv_heads", "ffn", "seq", "global_batch", "micro_batch", "tp", "pp",
    "cp", "ep", "fsdp", "vpp", "recompute", "precision",
)  # fmt: skip
COLUMNS = (
    *CONFIGURATION, "id", "source", "gpus_per_node", "interconnect", "vocab", "metric", "flops_convention", "value",
    "note",
)  # fmt: skip
CLUSTER = ("gpu", "n_gpus", "seq", "global_batch", "precision")
# Field of an ExecutionPlan -> column; an empty cell is 1.
PLAN_COLUMNS = {
    "gpus": "n_gpus", "sequence": "seq", "batch": "global_batch", "micro_batch": "micro_batch", "tp": "tp", "pp": "pp",
    "cp": "cp", "ep": "ep", "shard": "fsdp", "chunks": "vpp",
}  # fmt: skip
SHIPPED_POINTS = Path(__file__).parents[1] / "data" / "points.csv"
"""Rows whose sources allow redistribution (NOTICE)."""
METRICS = ("step_s", "tok_s_per_gpu", "tflops_per_gpu", "mfu")
MICRO_BATCHES = (1.0, 2.0, 4.0, 8.0)  # tried where a source does not state the size: the fastest that divides counts
NODE_LATENCY_US, NETWORK_LATENCY_US = 2.0, 10.0


@dataclass(frozen=True)
class MeasuredPoint:
    id: str
    source: str
    family: str
    """Source and model: the unit that leave-one-family-out leaves out."""
    cluster_key: str
    """Source, model, GPU type and count, batch: plans with the same key compete."""
    config: str
    """Digest of the configuration: rows of one configuration stay together."""
    kind: str
    """GPU type whose calibration applies."""
    program: str
    step_s: float
    model: Model
    plan: ExecutionPlan
    cluster: Cluster
    peak_bytes: float | None
    """Measured peak memory of a GPU, where the source states it."""
    candidates: tuple[ExecutionPlan, ...]
    """Plans that agree with what is stated: one, unless the micro-batch or the chunks are not. The fastest counts."""


@dataclass(frozen=True)
class MeasuredPoints:
    kept: tuple[MeasuredPoint, ...]
    left_out: Counter[str]
    """Reason -> rows."""


def read_points(path: str | Path) -> MeasuredPoints:
    try:
        text = storage.read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"is not UTF-8 ({error})", "give a CSV of measured points") from None
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
    if missing:
        raise UserError(str(path), f"has no column {', '.join(missing)}", "give a CSV with the columns of points.csv")
    kept: list[MeasuredPoint] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(reader, start=2):
        try:
            point = _read_point(row)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}, line {number}", f"cannot be read ({error})", "fix that row") from None
        if isinstance(point, str):
            left_out[point] += 1
        else:
            kept.append(point)
    if not kept:
        raise UserError(str(path), "has no row that can be planned", "give a CSV of measured points")
    return MeasuredPoints(tuple(kept), left_out)


def stack_points(points: Sequence[MeasuredPoint]) -> tuple[Model, ExecutionPlan, Cluster, Index]:
    """All candidates of all points as one model, plan and cluster of arrays, and the first candidate of each point."""
    counts = [len(point.candidates) for point in points]
    owners = [point for point, count in zip(points, counts, strict=True) for _ in range(count)]
    starts = np.cumsum([0, *counts])[:-1]
    plans = [plan for point in points for plan in point.candidates]
    return stacked([p.model for p in owners]), stacked(plans), stacked([p.cluster for p in owners]), starts


def _read_point(row: Row) -> MeasuredPoint | str:
    """A point, or the reason why the row cannot be one."""
    if not (row["hidden"] and row["layers"] and row["heads"]):
        return "no architecture given (hybrid or unnamed model)"
    if not (row["n_gpus"] and row["seq"] and row["global_batch"] and row["value"]):
        return "no GPU count, sequence, batch or value given"
    if low_precision(row["precision"]) is None:
        return f"unknown precision {row['precision']!r}"
    for name, known in (("metric", METRICS), ("recompute", ("", *RECOMPUTE))):
        if row[name] not in known:
            return f"unknown {name} {row[name]!r}"
    facts = NoteFacts.read(row["note"])
    if reason := published_sources.exclusion(row, facts):
        return reason
    if gpu_data(row["gpu"]) is None:
        return f"unknown GPU {row['gpu']}"
    settings = published_sources.row_settings(row, facts)
    try:
        model = _model(row, facts, settings)
    except ConfigError as error:
        return f"a model that lakh cannot describe ({error.where}: {error.found})"
    plan, name = _plan(row, settings), facts.model or "unnamed"
    return MeasuredPoint(
        id=row["id"],
        source=row["source"],
        family=f"{row['source']}: {name}",
        cluster_key="|".join([row["source"], name, *(row[column] for column in CLUSTER)]),
        config=hashlib.sha256("|".join(row[column] for column in CONFIGURATION).encode()).hexdigest()[:12],
        kind=_kind(row["gpu"]),
        program=settings.program,
        step_s=_step_s(row, facts, model, plan),
        model=model,
        plan=plan,
        cluster=_cluster(row["gpu"], int(float(row["gpus_per_node"] or 8)), settings.node_GBps, _stated_nic_GBps(row)),
        peak_bytes=facts.peak_bytes,
        candidates=tuple(_candidates(plan, model.layers, bool(row["micro_batch"]), settings.interleaves)),
    )


def _kind(gpu: str) -> str:
    family = gpu_family(gpu)
    return "Blackwell" if family in ("B200", "GB200", "B300", "GB300") else "H100-500W" if "500W" in gpu else family


def _model(row: Row, facts: NoteFacts, settings: RowSettings) -> Model:
    def column(name: str, default: int = 0) -> int:
        return int(float(row[name] or default))

    width, heads = column("hidden"), column("heads")
    ffn = column("ffn", 4 * width)
    values: dict[str, Any] = {
        "layers": column("layers"),
        "width": width,
        "heads": heads,
        "kv_heads": column("kv_heads", heads),
        "ffn": ffn,
        "vocab": column("vocab", 51200),
        "tied": False,
        "gated": settings.gated and column("ffn") != 4 * width,
        "head_size": facts.head_dim or width // heads,
    }
    experts = settings.model.get("experts", {})
    values |= {name: value for name, value in settings.model.items() if name != "experts"}
    if facts.experts:
        routed = {"count": facts.experts, "top_k": facts.top_k, "ffn": facts.expert_ffn or ffn}
        values["experts"] = routed | experts
    return config.from_dict(Model, values, origin=row["id"])


def _plan(row: Row, settings: RowSettings) -> ExecutionPlan:
    values: dict[str, Any] = {name: float(row[column] or 1) for name, column in PLAN_COLUMNS.items()}
    values |= {"low_precision": low_precision(row["precision"]), **settings.plan}
    values["recompute"] = RECOMPUTE.index(values["recompute"])
    if settings.shards_context:
        values["shard"] *= values["cp"]
    if values["shard"] > 1:
        values["zero"] = 0
    return ExecutionPlan.of(**values)


def _candidates(
    plan: ExecutionPlan, layers: int, states_micro_batch: bool, interleaves: bool
) -> Iterator[ExecutionPlan]:
    sizes, chunks = [plan.micro_batch], [plan.chunks]
    if not states_micro_batch:
        sizes = [size for size in MICRO_BATCHES if plan.batch % (plan.data_ranks * size) == 0] or sizes
    if interleaves and plan.pp > 1 and plan.chunks == 1:
        per_stage = int(layers / plan.pp)
        chunks = [float(n) for n in range(1, per_stage + 1) if per_stage % n == 0]
    for size in sizes:
        for count in chunks:
            yield replace(plan, micro_batch=size, chunks=count)


def _stated_nic_GBps(row: Row) -> float | None:
    """NIC bandwidth per GPU, from "8x400 Gb/s" or "800 Gb/s per node" in the column `interconnect`."""
    rails = re.search(r"(\d+)x(\d+) Gb/s", row["interconnect"])
    per_node = re.search(r"(\d+) Gb/s (?:RoCE )?per node", row["interconnect"])
    if rails:
        return int(rails[1]) * int(rails[2]) / 8 / float(row["gpus_per_node"])
    return int(per_node[1]) / 8 / float(row["gpus_per_node"]) if per_node else None


@cache
def _cluster(name: str, node_size: int, node_GBps: float | None, nic_GBps: float | None) -> Cluster:
    part = gpu_data(name)
    assert part is not None
    gpu = Gpu(
        kind=name,
        memory_GiB=part["memory_GB"] * 1e9 / 2**30,
        dense_bf16_TFLOPs=part["TFLOPs"],
        memory_bandwidth_GBps=part["memory_GBps"],
        source="data sheet",
    )
    node_GBps, nic_GBps = node_GBps or part["node_GBps"], nic_GBps or part["nic_GBps"]
    node = Tier(name="node", size=node_size, bandwidth_GBps=node_GBps, latency_us=NODE_LATENCY_US)
    network = Tier(name="network", size=node_size << 20, bandwidth_GBps=nic_GBps, latency_us=NETWORK_LATENCY_US)
    return Cluster(name=name, gpu=gpu, tiers=(node, network))


def _step_s(row: Row, facts: NoteFacts, model: Model, plan: ExecutionPlan) -> float:
    value, metric = float(row["value"]), row["metric"]
    tokens_per_gpu = float(plan.batch * plan.sequence / plan.gpus)
    if metric == "step_s":
        return value
    if metric == "tok_s_per_gpu":
        return tokens_per_gpu / value
    if metric == "mfu":
        value *= (gpu_data(row["gpu"]) or {})["TFLOPs"] / 100
    if row["flops_convention"] == "hardware":  # four passes over the blocks, three over the logits, full attention
        B, s, L, h, V = plan.batch, plan.sequence, model.layers, model.width, model.vocab
        flops = 96 * B * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))
        return float(flops / (plan.gpus * value * 1e12))
    causal = row["source"].startswith("Megatron-Bridge")
    per_token = facts.flops_per_token or model.flops_per_token(plan.sequence, causal=causal)
    return tokens_per_gpu * per_token / (value * 1e12)
