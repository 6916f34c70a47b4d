"""Published measurements: a CSV of (configuration -> speed) points, each turned into seconds per step.

Every source counts FLOPs in its own way, so a figure becomes seconds by the source's own rule first. What a source
does not say is assumed by its code base (code_bases.py). A row that cannot be planned (no architecture, a
figure for a whole run) is left out with a reason and a count, never silently.

Rows of one configuration share a `config` digest: they always stay on the same side of a split.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.planner.code_bases import CodeBase, code_base
from lakh.planner.hardware import (
    ATTENTION_GAIN,
    PROCESSORS,
    SOFTMAX_KNEE,
    SWITCH_REDUCES,
    TILE_COLUMNS,
    Hardware,
    Level,
    kind_of,
    sustained,
)
from lakh.planner.layout import RECOMPUTE, Layout
from lakh.planner.recipes import (
    exposes_tensor_traffic,
    graphs,
    overlaps_experts,
    repeats_activation,
    repeats_latent,
    sends_once_per_node,
    writes_scores,
)
from lakh.planner.shape import Shape

__all__ = ["Index", "Point", "Points", "read_points", "stack"]

Index: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

CONFIGURATION = (
    "gpu", "n_gpus", "hidden", "layers", "heads", "kv_heads", "ffn", "seq", "global_batch", "micro_batch", "tp", "pp",
    "cp", "ep", "fsdp", "vpp", "recompute", "precision",
)  # fmt: skip
COLUMNS = (
    *CONFIGURATION, "id", "source", "gpus_per_node", "interconnect", "vocab", "metric", "flops_convention", "value",
    "note",
)  # fmt: skip


# Dense bf16/fp16 peak TFLOP/s, memory GB, memory GB/s, NVLink GB/s and NIC GB/s per GPU and direction; NVIDIA data
# sheets. The 500 W H100 (HBM2e) is a part of which only the memory is published; its peak is taken as the H100's.
PARTS = {
    "V100-32": (125.0, 32, 900, 150.0, 12.5),
    "A100-40": (312.0, 40, 1555, 300.0, 25.0),
    "A100-80": (312.0, 80, 2039, 300.0, 25.0),
    "H100-80": (989.4, 80, 3350, 450.0, 50.0),
    "H100-96-500W": (989.4, 96, 2400, 450.0, 50.0),
    "B200": (2250.0, 192, 8000, 900.0, 50.0),
    "B300": (2250.0, 288, 8000, 900.0, 100.0),
    "GB200": (2450.0, 192, 8000, 900.0, 50.0),
    "GB300": (2450.0, 288, 8000, 900.0, 100.0),
}
CLUSTER = ("gpu", "n_gpus", "seq", "global_batch", "precision")
METRICS = ("step_s", "tok_s_per_gpu", "tflops_per_gpu", "mfu")
LOW_PRECISION = {"fp16": 0.0, "bf16": 0.0, "fp8": 1.0, "fp8-rowwise": 1.0, "mxfp8": 1.0, "nvfp4": 3.0}
LOW_PRECISION_NARROW = 2.0  # nvfp4 on B200 and GB200: three times the fp8 gain is B300's
MICRO_BATCHES = (1.0, 2.0, 4.0, 8.0)  # tried where a source does not say: the fastest that divides is taken


@dataclass(frozen=True)
class Point:
    id: str
    source: str
    family: str
    """Source and model: what leave-one-family-out leaves out."""
    cluster: str
    """Model, GPU type and count of one source: inside it, layouts compete."""
    config: str
    """Digest of the configuration: rows of one configuration stay together."""
    gpu: str
    kind: str
    code: str
    step_s: float
    shape: dict[str, float]
    layout: dict[str, float]
    hardware: dict[str, float]
    peak_bytes: float | None
    """Measured peak memory of a GPU, where the source gives it."""
    candidates: tuple[dict[str, float], ...]
    """Layouts that agree with what is stated; one, unless the micro-batch or the chunks are not. The fastest counts."""


@dataclass(frozen=True)
class Points:
    kept: tuple[Point, ...]
    left_out: Counter[str]
    """Reason -> rows."""


def read_points(path: str | Path) -> Points:
    try:
        text = storage.read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"is not UTF-8 ({error})", "give a CSV of measured points") from None
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
    if missing:
        raise UserError(str(path), f"has no column {', '.join(missing)}", "give a CSV with the columns of points.csv")
    kept: list[Point] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(reader, start=2):
        try:
            point = _point(row)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}, line {number}", f"cannot be read ({error})", "mend that row") from None
        if isinstance(point, str):
            left_out[point] += 1
        else:
            kept.append(point)
    if not kept:
        raise UserError(str(path), "holds no point that can be planned", "give a CSV of measured points")
    return Points(tuple(kept), left_out)


def _point(row: dict[str, str]) -> Point | str:
    """A point, or the reason why the row cannot be one."""
    note, source = row["note"], row["source"]
    if not (row["hidden"] and row["layers"] and row["heads"]):
        return "no architecture given (hybrid or unnamed model)"
    if not (row["n_gpus"] and row["seq"] and row["global_batch"] and row["value"]):
        return "no GPU count, sequence, batch or value given"
    for name, known in (("precision", LOW_PRECISION), ("metric", METRICS), ("recompute", ("", *RECOMPUTE))):
        if row[name] not in known:
            return f"unknown {name} {row[name]!r}"
    if source.startswith("LLaMA") or "run level" in note:
        return "a figure for a whole run, with its stops"
    if source == "MegaScale" and not re.search(r"; (Megatron-LM|ablation baseline)", note):
        return "not the plain transformer (parallel block, sliding window)"
    if row["gpu"] not in PARTS:
        return f"unknown GPU {row['gpu']}"
    if "JAX" in note and not row["fsdp"]:
        return "sharding not stated"
    code = code_base(source)
    if "ZeRO-3 (DeepSpeed)" in note:
        code = replace(code, name="deepspeed-zero3")
    if "JAX" in note:
        code = CodeBase("maxtext", sequence_parallel=False, recompute="full", zero1=False, native_attention=True)
    shape = _shape(row, code)
    layout = _layout(row, code)
    return Point(
        id=row["id"],
        source=source,
        family=f"{source}: {_model_name(note)}",
        cluster="|".join([source, _model_name(note), *(row[name] for name in CLUSTER)]),
        config=_digest(row),
        gpu=row["gpu"],
        kind=_kind(row["gpu"]),
        code=code.name,
        step_s=_step_s(row, shape, layout),
        shape=shape,
        layout=layout,
        hardware=_hardware(row),
        peak_bytes=_peak_bytes(note),
        candidates=tuple(_candidates(layout, shape["layers"], knows=bool(row["micro_batch"]), code=code)),
    )


def _kind(gpu: str) -> str:
    kind = kind_of(gpu)
    return "Blackwell" if kind in ("B200", "GB200", "B300", "GB300") else "H100-500W" if "500W" in gpu else kind


def _model_name(note: str) -> str:
    found = re.search(r"model=([^;]+)", note)
    return found[1].strip() if found else "unnamed"


def _digest(row: dict[str, str]) -> str:
    """Same model, GPU, count, batch, parallelism and precision: the same configuration."""
    text = "|".join(row[name] for name in CONFIGURATION)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shape(row: dict[str, str], code: CodeBase) -> dict[str, float]:
    note, h, a = row["note"], float(row["hidden"]), float(row["heads"])
    named = re.search(r"head dim (\d+)", note)
    experts = re.search(r"MoE (\d+) (?:experts|routed) top-(\d+)", note)
    expert_ffn = re.search(r"expert ffn (\d+)", note)
    shape = {
        "layers": float(row["layers"]),
        "width": h,
        "heads": a,
        "kv_heads": float(row["kv_heads"] or a),
        "head_dim": float(named[1]) if named else h / a,
        "ffn": float(row["ffn"] or 4 * h),
        "vocab": float(row["vocab"] or 51200),
        "gated": float(_is_gated(row, code)),
        "experts": float(experts[1]) if experts else 0.0,
        "top_k": float(experts[2]) if experts else 0.0,
        "expert_ffn": float(expert_ffn[1] if expert_ffn else row["ffn"]) if experts else 0.0,
    }
    if "gpt-oss" in note:  # its model card: every other layer looks back 128 tokens; experts have biases
        shape |= {"window": 128.0, "windowed": 0.5, "expert_bias": 1.0}
    if "qwen3" in note:  # its report (arXiv 2505.09388), section 2
        shape["qk_norm"] = 1.0
    if "shared" in note and experts:
        shape["shared_experts"] = 1.0
    if "MLA" in note and "deepseek-v3" in note:  # DeepSeek-V3 report (arXiv 2412.19437), section 4.2
        shape |= {"q_rank": 1536.0, "kv_rank": 512.0, "rope_dim": 64.0, "head_dim": 128.0, "dense_layers": 3.0}
        shape["routed_nodes"] = 4.0  # same report: a token goes to at most four nodes
    return shape


def _is_gated(row: dict[str, str], code: CodeBase) -> bool:
    """A feed-forward four times the width is the plain kind; nemotron's squared ReLU is plain too."""
    if re.search(r"llama|qwen|deepseek|gpt-oss|mixtral|grok|moonlight|kimi", row["note"].partition(";")[0]):
        return True
    return code.gated and float(row["ffn"] or 0) != 4 * float(row["hidden"])


def _layout(row: dict[str, str], code: CodeBase) -> dict[str, float]:
    note = row["note"]
    shard = float(row["fsdp"] or 1)
    if code.name == "torchtitan":
        shard *= float(row["cp"])  # torchtitan shards over its context ranks too
    recompute = row["recompute"] or code.recompute
    if code.name == "torchtitan" and recompute == "selective":
        recompute = "half"  # torchtitan's "selective" repeats every other layer, or every other matrix product
    if writes_scores(row):
        recompute = "selective"
    zero1 = ("ZeRO-1" in note) if code.name == "nanotron" else code.zero1
    sp = code.sequence_parallel or "sequence parallelism on" in note
    low = LOW_PRECISION[row["precision"]]
    if low == LOW_PRECISION["nvfp4"] and "300" not in row["gpu"]:
        low = LOW_PRECISION_NARROW
    return {
        "gpus": float(row["n_gpus"]),
        "sequence": float(row["seq"]),
        "batch": float(row["global_batch"]),
        "micro_batch": float(row["micro_batch"] or 1),
        "tp": float(row["tp"] or 1),
        "pp": float(row["pp"] or 1),
        "cp": float(row["cp"] or 1),
        "ep": float(row["ep"] or 1),
        "shard": shard,
        "chunks": float(row["vpp"] or 1),
        "recompute": float(RECOMPUTE.index(recompute)),
        "zero1": float(zero1 and shard == 1),
        "sequence_parallel": float(sp),
        "flash": float(code.flash and not writes_scores(row)),
        "native_attention": float(code.native_attention),
        "eager": float(code.eager and "compile" not in note),
        "overlap": float(code.overlap),
        "tensor_overlap": float((code.tensor_overlap and not exposes_tensor_traffic(row)) or "async TP" in note),
        "low_precision": low,
        "gradient_bytes": code.gradient_bytes,
        "weight_bytes": code.weight_bytes,
        "optimizer_bytes": 4.0 if "pure bf16 states" in note else code.optimizer_bytes,
        "experts_whole": float(code.name == "nemo"),
        "node_dispatch": float(sends_once_per_node(row)),
        "expert_overlap": float(overlaps_experts(row)),
        "adapters": float("LoRA" in note),
        "graphed": float(graphs(row)),
        "repeats_activation": float(repeats_activation(row)),
        "repeats_latent": float(repeats_latent(row)),
        "pp_inside": 0.0,
    }


def _peak_bytes(note: str) -> float | None:
    found = re.search(r"peak ([\d.]+) ?(GiB|GB)", note)
    return float(found[1]) * (2**30 if found[2] == "GiB" else 1e9) if found else None


def _candidates(layout: dict[str, float], layers: float, *, knows: bool, code: CodeBase) -> Iterator[dict[str, float]]:
    data_ranks = layout["gpus"] / (layout["tp"] * layout["pp"] * layout["cp"])
    sizes = [layout["micro_batch"]]
    if not knows:
        sizes = [size for size in MICRO_BATCHES if layout["batch"] % (data_ranks * size) == 0] or sizes
    chunks = [layout["chunks"]]
    if code.interleaves and layout["pp"] > 1 and layout["chunks"] == 1:
        per_stage = int(layers / layout["pp"])
        chunks = [float(n) for n in range(1, per_stage + 1) if per_stage % n == 0]
    for size in sizes:
        for count in chunks:
            yield {**layout, "micro_batch": size, "chunks": count}


def _hardware(row: dict[str, str]) -> dict[str, float]:
    peak, memory_GB, memory_GBps, node_GBps, nic_GBps = PARTS[row["gpu"]]
    per_node = re.search(r"(\d+) Gb/s (?:RoCE )?per node", row["interconnect"])
    rails = re.search(r"(\d+)x(\d+) Gb/s", row["interconnect"])
    if rails:
        nic_GBps = int(rails[1]) * int(rails[2]) / 8 / float(row["gpus_per_node"])
    elif per_node:
        nic_GBps = int(per_node[1]) / 8 / float(row["gpus_per_node"])
    if "H800" in row["note"] or "H800" in row["interconnect"]:
        node_GBps = 200.0
    return {
        "peak_FLOPs": peak * 1e12,
        "switch_reduces": float(kind_of(row["gpu"]) in SWITCH_REDUCES),
        "sustained": sustained(kind_of(row["gpu"]), peak),
        "softmax_knee": SOFTMAX_KNEE.get(kind_of(row["gpu"]), 0.0),
        "attention_gain": ATTENTION_GAIN.get(kind_of(row["gpu"]), 1.0),
        "memory_bytes": memory_GB * 1e9,
        "memory_Bps": memory_GBps * 1e9,
        "processors": float(PROCESSORS[kind_of(row["gpu"])]),
        "tile_columns": TILE_COLUMNS.get(kind_of(row["gpu"]), 128.0),
        "node_size": float(row["gpus_per_node"] or 8),
        "node_Bps": node_GBps * 1e9,
        "nic_Bps": nic_GBps * 1e9,
    }


def _step_s(row: dict[str, str], shape: dict[str, float], layout: dict[str, float]) -> float:
    value, metric = float(row["value"]), row["metric"]
    tokens_per_gpu = layout["batch"] * layout["sequence"] / layout["gpus"]
    if metric == "step_s":
        return value
    if metric == "tok_s_per_gpu":
        return tokens_per_gpu / value
    if metric == "mfu":
        value *= PARTS[row["gpu"]][0] / 100
    given = re.search(r"([\d.]+) GFLOP/token", row["note"])
    if row["flops_convention"] == "hardware":  # four passes over the blocks, three over the logits, full attention
        B, s, L, h, V = (layout["batch"], layout["sequence"], shape["layers"], shape["width"], shape["vocab"])
        flops = 96 * B * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))
        return float(flops / (layout["gpus"] * value * 1e12))
    causal = row["source"].startswith("Megatron-Bridge")
    per_token = float(given[1]) * 1e9 if given else Shape(**shape).flops_per_token(layout["sequence"], causal=causal)
    return float(tokens_per_gpu * per_token / (value * 1e12))


def stack(points: Sequence[Point]) -> tuple[Shape, Layout, Hardware, Index]:
    """All candidates of all points as three descriptions of arrays, and where each point's candidates begin."""
    rows = [(point, layout) for point in points for layout in point.candidates]
    starts = np.cumsum([0, *(len(point.candidates) for point in points)])[:-1]
    names = sorted({name for point in points for name in point.shape})
    shape = Shape(**{name: np.array([point.shape.get(name, 0.0) for point, _ in rows]) for name in names})
    layout = Layout(**{name: np.array([values[name] for _, values in rows]) for name in points[0].layout})
    hw = {name: np.array([point.hardware[name] for point, _ in rows]) for name in points[0].hardware}
    nic = hw.pop("nic_Bps")
    outside = Level(np.full(len(rows), np.inf), nic, np.full(len(rows), 10e-6))
    return shape, layout, Hardware(kind="points", node_latency_s=2e-6, levels=(outside,), **hw), starts
