"""Every layout of a model on a cluster, priced: the fastest that fits, what it trades against, and why others lost.

Candidates (candidates.py) are held as arrays and worked off in blocks that stay in cache, on all cores (numpy releases
the interpreter): memory first, time only for what fits. Nothing is sampled: the answer is the best of all that were
counted.

An impossible search is an answer with a reason (`best` is None), not an error.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lakh.planner.calibration import calibrated
from lakh.planner.candidates import Limits, candidates, single
from lakh.planner.estimate import USABLE_SHARE, describe, error_bar
from lakh.planner.hardware import Hardware, hardware_of
from lakh.planner.layout import Layout
from lakh.planner.memory import memory
from lakh.planner.shape import Array, Shape
from lakh.planner.steptime import step_time
from lakh.spec.cluster import Cluster

__all__ = ["Found", "search"]

WORTH_SHOWING = 3.0  # times the best step: slower layouts save memory that nobody wants at that price
BLOCK = 16384  # rows of one block: some hundred arrays of 128 KB, so that a core's cache holds what it works on


@dataclass(frozen=True)
class Found:
    searched: int
    seconds: float
    best: dict[str, Any] | None
    pareto: list[dict[str, Any]]
    why: str
    refused: dict[str, int] = field(default_factory=dict)
    """Reason -> candidates that fell out."""
    best_layout: Layout | None = None


def search(shape: Shape, cluster: Cluster, limits: Limits, usd_per_gpu_hour: float = 0.0) -> Found:
    """The fastest layout that fits and keeps the deadline, and the Pareto front of time, cost and memory."""
    began = time.perf_counter()
    hw = hardware_of(cluster)
    layouts, refused = candidates(shape, limits)
    count = int(np.size(layouts.tp))
    searched = count + sum(refused.values())
    if count == 0:
        reason = "; ".join(f"{why}: {n}" for why, n in refused.most_common()) or "no combination divides"
        return Found(searched, time.perf_counter() - began, None, [], f"no layout divides: {reason}", dict(refused))
    step_s, bytes_used = _evaluate(shape, layouts, hw)
    limit = float(hw.memory_bytes) * USABLE_SHARE
    fits = bytes_used <= limit
    refused["does not fit in memory"] += int((~fits).sum())
    usable = fits.copy()
    steps = limits.tokens / (limits.batch * limits.sequence) if limits.tokens else None
    if limits.days and steps:
        in_time = step_s * steps <= limits.days * 86400
        refused["misses the deadline"] += int((usable & ~in_time).sum())
        usable &= in_time
    if not usable.any():
        why = _why_nothing(layouts, step_s, bytes_used, fits, limit, limits, steps)
        return Found(searched, time.perf_counter() - began, None, [], why, dict(refused))
    usd_per_step = np.where(fits, step_s, 0.0) * layouts.gpus / 3600 * usd_per_gpu_hour
    front = _pareto(step_s, usd_per_step, bytes_used, np.flatnonzero(usable))
    winner = min(front, key=lambda i: (step_s[i], usd_per_step[i], bytes_used[i]))
    rows = [_row(layouts, i, step_s, usd_per_step, bytes_used, steps) for i in front]
    best = _row(layouts, winner, step_s, usd_per_step, bytes_used, steps)
    best["error_bar"] = error_bar(best["step_s"], *calibrated(hw.kind))
    why = _why(shape, layouts, hw, step_s, usable, fits, bytes_used, winner, limit)
    one = single(layouts, winner)
    return Found(searched, time.perf_counter() - began, best, rows, why, dict(refused), one)


def _evaluate(shape: Shape, layouts: Layout, hw: Hardware) -> tuple[Array, Array]:
    """Seconds and bytes of every candidate; seconds are infinite where the memory does not suffice."""
    count = int(np.size(layouts.tp))
    step_s, bytes_used = np.full(count, np.inf), np.zeros(count)
    fractions = calibrated(hw.kind)[0].fractions
    limit = float(hw.memory_bytes) * USABLE_SHARE

    def work(start: int) -> None:
        here = slice(start, min(start + BLOCK, count))
        part = _counted_in_doubles(layouts.take(here))
        used = memory(shape, part).total_bytes
        bytes_used[here] = used
        good = np.flatnonzero(used <= limit)
        if good.size:
            some = part.take(good) if good.size < used.size else part
            step_s[start + good] = step_time(shape, some, hw, fractions).total_s

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(work, range(0, count, BLOCK)))
    return step_s, bytes_used


def _counted_in_doubles(layouts: Layout) -> Layout:
    values = {f.name: getattr(layouts, f.name) for f in fields(layouts)}
    return replace(layouts, **{name: v.astype(float) for name, v in values.items() if np.ndim(v)})


def _pareto(step_s: Array, usd: Array, size: Array, among: Array, most: int = 12) -> list[int]:
    """Indices that nothing beats in time, money and memory at once; at most so many, spread over the front."""
    among = among[step_s[among] <= WORTH_SHOWING * step_s[among].min()]
    order = among[np.lexsort((size[among], usd[among], step_s[among]))]
    front: list[int] = []
    best_usd, best_size = math.inf, math.inf
    corners: list[tuple[float, float]] = []
    for i in order[:200_000]:
        if usd[i] < best_usd * (1 - 1e-9) or size[i] < best_size * 0.99:
            if any(u <= usd[i] and s <= size[i] for u, s in corners):
                continue
            front.append(int(i))
            corners.append((float(usd[i]), float(size[i])))
            best_usd, best_size = min(best_usd, float(usd[i])), min(best_size, float(size[i]))
    if len(front) > most:
        front = [front[round(k * (len(front) - 1) / (most - 1))] for k in range(most)]
    return front


def _row(layouts: Layout, i: int, step_s: Array, usd: Array, size: Array, steps: float | None) -> dict[str, Any]:
    one = single(layouts, i)
    row = {
        "gpus": int(one.gpus),
        "name": _name(one),
        **describe(one),
        "stages_inside": bool(one.pp_inside),
        "step_s": float(step_s[i]),
        "usd_per_step": float(usd[i]),
        "memory_bytes": float(size[i]),
    }
    if steps:
        row |= {"run_days": float(step_s[i]) * steps / 86400, "run_usd": float(usd[i]) * steps}
    return row


def _why(
    shape: Shape, layouts: Layout, hw: Hardware, step_s: Array, usable: Array, fits: Array, size: Array, winner: int,
    limit: float,
) -> str:  # fmt: skip
    """The winner against the fastest layout that is different in kind, part by part."""
    best = single(layouts, winner)
    other = usable & ((layouts.tp != best.tp) | (layouts.pp != best.pp) | (layouts.cp != best.cp))
    words = [f"{_name(best)} takes {step_s[winner]:.4g} s"]
    if other.any():
        rival = int(np.flatnonzero(other)[np.argmin(step_s[other])])
        fractions = calibrated(hw.kind)[0].fractions
        ours, theirs = (step_time(shape, one, hw, fractions) for one in (best, single(layouts, rival)))
        gaps = {name: float(getattr(theirs, name) - getattr(ours, name)) for name in vars(ours)}
        more = step_s[rival] / step_s[winner] - 1
        told = {max(gaps, key=gaps.__getitem__), min(gaps, key=gaps.__getitem__)}  # where it loses most, and wins most
        parts = [f"{gap:+.3g} s in {name.removesuffix('_s')}" for name, gap in gaps.items() if name in told and gap]
        parts.sort(key=lambda part: part.startswith("-"))
        words.append(f"the runner-up {_name(single(layouts, rival))} takes {more:.1%} more: {', '.join(parts)}")
    refused = int((~fits).sum())
    words.append(f"{refused:,} layouts need more than {limit / 2**30:.1f} GiB")
    return "; ".join(words)


def _why_nothing(
    layouts: Layout, step_s: Array, size: Array, fits: Array, limit: float, limits: Limits, steps: float | None
) -> str:
    if not fits.any():
        least = int(np.argmin(size))
        return (
            f"nothing fits: the leanest, {_name(single(layouts, least))}, needs {size[least] / 2**30:.1f} GiB of "
            f"{limit / 2**30:.1f}; use more GPUs, or GPUs with more memory"
        )
    assert steps is not None
    fastest = int(np.argmin(step_s))
    return (
        f"nothing is fast enough: the best, {_name(single(layouts, fastest))}, takes "
        f"{step_s[fastest] * steps / 86400:.1f} days of {limits.days:g}; use more GPUs or fewer tokens"
    )


def _name(layout: Layout) -> str:
    lo = layout
    axes = {"tp": lo.tp, "pp": lo.pp, "cp": lo.cp, "ep": lo.ep, "dp": lo.data_ranks}
    parts = [f"{axis}={int(size)}" for axis, size in axes.items() if int(size) > 1]
    extra = describe(layout)
    words = [f"micro-batch {extra['micro_batch']}", extra["schedule"], f"recompute {extra['recompute']}"]
    if extra["shard"] > 1:
        words.append(f"shard {extra['shard']}")
    elif extra["zero"]:
        words.append(f"zero-{extra['zero']}")
    words += [word for word, is_so in (("offload", lo.offload), ("exchange hidden", lo.expert_overlap)) if is_so]
    return f"{' '.join(parts) or 'one GPU'} ({', '.join(words)})"
