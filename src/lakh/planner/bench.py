"""How fast the planner answers, beside Calculon where a checkout of it is given; each figure with its own count.

Calculon runs out of process from its own files (it is no dependency): one configuration, compiled and run over and
over in one warm process, the way its own search does it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lakh.errors import UserError
from lakh.planner.catalogue import architecture
from lakh.planner.estimate import estimate_layout
from lakh.planner.failures import load_failures
from lakh.planner.goodput import Policy, Scene, simulate
from lakh.planner.layout import FULL, Layout
from lakh.planner.search import Limits, search
from lakh.spec.cluster import load_cluster

__all__ = ["bench_plan", "calculon_step"]

CALCULON_TIMEOUT_S = 120.0
CALCULON_EXAMPLE = ("megatron-1T.json", "3072_t4_p64_d12_mbs4_full.json", "a100_80g.json")
CALCULON_DRIVER = """
import json, logging, sys, time
import calculon
from calculon.llm import Llm
from calculon import System
app, exe, system = (json.load(open(path)) for path in sys.argv[1:4])
times = []
for _ in range(int(sys.argv[4])):
    began = time.perf_counter()
    model = Llm(Llm.Application(app), logging.getLogger("quiet"))
    place = System(system)
    model.compile(place, Llm.Execution.from_json(exe))
    model.run(place)
    times.append(time.perf_counter() - began)
print(json.dumps({"times": times, "step_s": model.get_total_time()}))
"""


def bench_plan(calculon: str | None = None, repeats: int = 20) -> list[dict[str, Any]]:
    """Rows of (what, system, count, seconds, seconds for each, step_s where there is one)."""
    place = load_cluster("llama3-24k-roce")
    big = architecture("llama3-405b").shape
    limits = Limits(batch=2048, sequence=8192, gpus=(4096, 8192, 16384), tokens=15.6e12)
    search(big, place, Limits(batch=2048, sequence=8192, gpus=(256,)))  # warm: the calibration is read once
    began = time.perf_counter()
    found = search(big, place, limits, 2.0)
    rows = [_row("search: 405B on 4,096 to 16,384 GPUs", "lakh", found.searched, time.perf_counter() - began)]

    one, pod = architecture("gpt-1t").shape, load_cluster("a100-pod")
    layout = Layout(
        gpus=3072.0, sequence=2048.0, batch=3072.0, micro_batch=4.0, tp=4.0, pp=64.0, recompute=float(FULL), zero1=1.0,
        sequence_parallel=1.0, flash=0.0, overlap=0.0,
    )  # fmt: skip
    estimate_layout(one, layout, pod)
    best, spread = _timed(lambda: estimate_layout(one, layout, pod), repeats)
    step_s = estimate_layout(one, layout, pod).step_s
    rows.append(_row("one estimate: 1T on 3,072 A100", "lakh", repeats, spread, best, step_s))
    if calculon:
        theirs = calculon_step(calculon, repeats)
        each = statistics.median(theirs["times"])
        rows.append(_row(rows[-1]["what"], "calculon", repeats, sum(theirs["times"]), each, theirs["step_s"]))

    known = load_failures("llama3")
    scene = Scene(gpus=16384, days=54.0, mtbf_s=known.mtbf_s(16384), replacing_share=known.replacing_share)
    began = time.perf_counter()
    result = simulate(scene, Policy(), runs=10_000)
    spent = time.perf_counter() - began
    rows.append(_row(f"54-day runs at 16,384 GPUs (goodput {result.goodput:.1%})", "lakh", 10_000, spent))
    return rows


def calculon_step(checkout: str, repeats: int) -> dict[str, Any]:
    """Calculon's times of one configuration in one warm process, and its answer."""
    root = Path(checkout)
    files = [
        str(root / folder / name)
        for folder, name in zip(("models", "examples", "systems"), CALCULON_EXAMPLE, strict=True)
    ]
    missing = [path for path in files if not Path(path).exists()]
    if missing or not (root / "calculon").is_dir():
        raise UserError(f"--calculon {checkout}", "is no checkout of Calculon", "give the folder of its repository")
    command = [sys.executable, "-c", CALCULON_DRIVER, *files, str(repeats)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CALCULON_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--calculon {checkout}", f"took over {CALCULON_TIMEOUT_S:g} s", "try again on a quiet machine"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"--calculon {checkout}", f"failed: {last}", "install what it needs, e.g. pip install psutil")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times), sum(times)


def _row(
    what: str, system: str, count: int, seconds: float, each: float | None = None, step_s: float | None = None
) -> dict[str, Any]:
    return {
        "what": what,
        "system": system,
        "count": count,
        "seconds": seconds,
        "seconds_each": each if each is not None else seconds / count,
        "simulated_step_s": step_s if step_s is not None else "",
    }
