"""Calculon as a peer (SC'23; Apache-2.0): the same published rows, run out of process from a checkout.

Calculon describes plain blocks with many heads or one, tensor, pipeline and data parallelism, and no vocabulary. Rows
that it cannot describe (`cannot_describe` gives the reason) are counted and left out for both. It runs twice: with
its system file as shipped, and with the network rate of the row and four numbers tuned on the rows that lakh was fitted
on, which is the fair comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lakh.errors import UserError
from lakh.planner.calibration.fit import EMPHASIS, SOURCE_WEIGHT, is_held_out
from lakh.planner.calibration.measured_points import MeasuredPoint
from lakh.planner.execution_plan import FULL, NONE, RECOMPUTE, SELECTIVE, ExecutionPlan
from lakh.planner.validation.accuracy import predictions, score_by

__all__ = ["CalculonComparison", "cannot_describe", "compare", "one_step"]

TIMEOUT_S = 900.0
SYSTEMS = {"A100": "a100_80g.json", "H100": "h100_80g_nvl8.json"}
EXAMPLE = ("megatron-1T.json", "3072_t4_p64_d12_mbs4_full.json", "a100_80g.json")
RECOMPUTE_NAMES = {NONE: "none", SELECTIVE: "attn_only", FULL: "full"}
TUNED = "calculon, tuned on the same rows"
DRIVER = Path(__file__).with_name("calculon_driver.py")


@dataclass(frozen=True)
class CalculonComparison:
    rows: list[dict[str, Any]]
    """One per source and system: n, mape, median_ape, bias, kendall_tau, on rows outside of both fits."""
    left_out: Counter[str]
    scales: dict[str, tuple[float, ...]]
    """GPU type -> tuned factors of its matrix rate, memory rate, node network and outer network."""


def cannot_describe(point: MeasuredPoint) -> str | None:
    """The reason why Calculon cannot describe this row, or None."""
    model, plan = point.model, point.plan
    if point.kind not in SYSTEMS:
        return f"no system file for {point.kind}"
    if model.experts or model.latent:
        return "experts or latent attention"
    if model.gated or model.kv_heads != model.heads:
        return "gated feed-forward or grouped queries"
    if plan.shard > 1 or plan.cp > 1:
        return "sharded weights or context parallelism"
    if plan.low_precision or plan.recompute not in RECOMPUTE_NAMES:
        return f"precision, or recompute {RECOMPUTE[int(plan.recompute)]}"
    return None


def compare(points: Sequence[MeasuredPoint], checkout: str, *, tune: bool = True) -> CalculonComparison:
    """lakh and Calculon on the rows that Calculon can describe and that are outside of the fits."""
    left_out = Counter(reason for point in points if (reason := cannot_describe(point)))
    shown: list[dict[str, Any]] = []
    scales: dict[str, tuple[float, ...]] = {}
    for kind in SYSTEMS:
        rows = [point for point in points if point.kind == kind and cannot_describe(point) is None]
        if not rows:
            continue
        system = _read(checkout, "systems", SYSTEMS[kind])
        system["mem1"]["GiB"] = system["mem2"]["GiB"] = 1e6  # compare times only, not whether it fits
        output = _run_calculon(checkout, {"rows": _requests(rows, system), "system": system, "tune": tune})
        times = {"calculon, as shipped": output["shipped"]} | ({TUNED: output["tuned"]} if tune else {})
        unseen = [i for i, point in enumerate(rows) if is_held_out(point.config)]
        good = [i for i in unseen if all(seconds[i] for seconds in times.values())]
        left_out["refused by Calculon"] += len(unseen) - len(good)
        shown += _scores([rows[i] for i in good], {name: [s[i] for i in good] for name, s in times.items()}, rows)
        if tune:
            scales[kind] = tuple(output["scales"])
    return CalculonComparison(shown, left_out, scales)


def _scores(
    unseen: Sequence[MeasuredPoint], theirs: dict[str, list[float]], rows: Sequence[MeasuredPoint]
) -> Iterator[dict[str, Any]]:
    """One line per source and system; a source that Calculon was not tuned on has no tuned line."""
    times = {"lakh": predictions(unseen)} | theirs
    by_system = {name: score_by(unseen, found, lambda p: p.source) for name, found in times.items()}
    tuned_on = {point.source for point in rows if _is_tuned_on(point)}
    for point in sorted({p.source: p for p in unseen}.values(), key=lambda p: p.source):
        for name, scores in by_system.items():
            if name != TUNED or point.source in tuned_on:
                yield {"source": f"{point.source} ({point.kind})", "system": name, **asdict(scores[point.source])}


def one_step(checkout: str, repeats: int) -> dict[str, Any]:
    """Calculon's example configuration, run repeatedly in one warm process: seconds per run, and its step time."""
    folders = ("models", "examples", "systems")
    application, execution, system = (
        _read(checkout, folder, name) for folder, name in zip(folders, EXAMPLE, strict=True)
    )
    row = {"application": application, "executions": [execution], "fitted": False}
    output = _run_calculon(checkout, {"rows": [row] * repeats, "system": system, "tune": False})
    return {"seconds": output["shipped_s"], "each_s": output["shipped_s"] / repeats, "step_s": output["shipped"][0]}


def _requests(points: Sequence[MeasuredPoint], system: dict[str, Any]) -> list[dict[str, Any]]:
    count = Counter(point.source for point in points)
    rows = []
    for point in points:
        place = json.loads(json.dumps(system))
        place["networks"][0]["size"] = point.cluster.node_size
        place["networks"][1]["bandwidth"] = point.cluster.tiers[1].bandwidth_GBps
        rows.append(
            {
                "application": _application(point),
                "executions": [_execution(point, plan) for plan in point.candidates],
                "system": place,
                "measured_s": point.step_s,
                "weight": EMPHASIS.get(point.source, 1.0) * count[point.source] ** SOURCE_WEIGHT,
                "fitted": _is_tuned_on(point),
            }
        )
    return rows


def _is_tuned_on(point: MeasuredPoint) -> bool:
    """Rows of several nodes that lakh was fitted on; single-node rows take an hour and do not depend on networks."""
    return not is_held_out(point.config) and bool(point.plan.gpus > point.cluster.node_size)


def _application(point: MeasuredPoint) -> dict[str, int]:
    model = point.model
    return {
        "hidden": model.width,
        "feedforward": model.ffn,
        "seq_size": int(point.plan.sequence),
        "attn_heads": model.heads,
        "attn_size": model.head_dim,
        "num_blocks": model.layers,
    }


def _execution(point: MeasuredPoint, plan: ExecutionPlan) -> dict[str, Any]:
    degree = {name: int(getattr(plan, name)) for name in ("gpus", "tp", "pp", "batch", "micro_batch", "chunks")}
    data = degree["gpus"] // (degree["tp"] * degree["pp"])
    node = point.cluster.node_size
    outside = int(degree["gpus"] > node)
    sequence_parallel = bool(plan.sequence_parallel) and degree["tp"] > 1
    recompute = RECOMPUTE_NAMES[int(plan.recompute)]
    return {
        "num_procs": degree["gpus"],
        "tensor_par": degree["tp"],
        "pipeline_par": degree["pp"],
        "data_par": data,
        "tensor_par_net": int(degree["tp"] > node),
        "pipeline_par_net": outside,
        "data_par_net": outside,
        "batch_size": degree["batch"],
        "microbatch_size": degree["micro_batch"],
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": recompute,
        "pipeline_interleaving": degree["chunks"] if degree["pp"] > 1 else 1,
        "optimizer_sharding": int(plan.zero) >= 1 and data > 1,
        "tensor_par_comm_type": "rs_ag" if sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if sequence_parallel and plan.tensor_overlap else "none",
        "seq_par_ag_redo": sequence_parallel and recompute != "full",
        "data_par_overlap": bool(plan.overlap) and data > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def _read(checkout: str, folder: str, name: str) -> dict[str, Any]:
    path = Path(checkout) / folder / name
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"--calculon {checkout}",
            f"is not a checkout of Calculon (no {folder}/{name})",
            "give its repository's folder",
        ) from None
    return found


def _run_calculon(checkout: str, request: dict[str, Any]) -> dict[str, Any]:
    if not (Path(checkout) / "calculon").is_dir():
        raise UserError(f"--calculon {checkout}", "is not a checkout of Calculon", "give the folder of its repository")
    environment = {**os.environ, "PYTHONPATH": checkout}
    command = [sys.executable, "-P", str(DRIVER)]  # -P: this folder has its own calculon.py
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        found = f"took over {TIMEOUT_S:g} s"
        raise UserError(f"--calculon {checkout}", found, "try again on a quiet machine") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"--calculon {checkout}", f"failed: {last}", "install what it needs, e.g. pip install psutil")
    output: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return output
