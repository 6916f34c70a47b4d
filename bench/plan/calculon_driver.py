"""Runs in Calculon's process: reads a JSON document of requests from stdin and writes one of results to stdout.

Imports Calculon from PYTHONPATH, and scipy only to tune. A configuration that Calculon refuses gives null. Tuning
scales four numbers of its system (matrix rate, memory rate, both networks) by a bounded least squares on
log(predicted/measured) of the rows marked as fitted, with the same weights and robust loss as lakh's own fit.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import time
from typing import Any

from calculon import System
from calculon.llm import Llm

NOISE = 0.03
LOW, HIGH = math.log(0.2), math.log(10.0)
MAX_EVALUATIONS = 12
UNSCALED = (1.0, 1.0, 1.0, 1.0)
REFUSED_LOG_ERROR = 1.0  # the error of a row that a scaled system refuses


def main() -> None:
    request = json.load(sys.stdin)
    rows = request["rows"]
    begun = time.perf_counter()
    shipped = [seconds(row | {"system": request["system"]}, UNSCALED) for row in rows]
    output: dict[str, Any] = {"shipped": shipped, "shipped_s": time.perf_counter() - begun}
    if request["tune"]:
        begun = time.perf_counter()
        scales = tuned(
            [with_fastest_candidate(row) for row, s in zip(rows, shipped, strict=True) if row["fitted"] and s]
        )
        output |= {"scales": scales, "tuned": [seconds(row, scales) for row in rows]}
        output["tuned_s"] = time.perf_counter() - begun
    sys.stdout.write(json.dumps(output) + "\n")


def seconds(row: dict[str, Any], scales: tuple[float, ...]) -> float | None:
    """The time of a row's fastest candidate; None if all are refused."""
    system = copy.deepcopy(row["system"])
    matrix, memory, node, network = scales
    system["matrix"]["float16"]["tflops"] *= matrix
    system["mem1"]["GBps"] *= memory
    system["networks"][0]["bandwidth"] *= node
    system["networks"][1]["bandwidth"] *= network
    times = []
    for execution in row["executions"]:
        try:
            model = Llm(Llm.Application(row["application"]), logging.getLogger("quiet"))
            place = System(system)
            model.compile(place, Llm.Execution.from_json(execution))
            model.run(place)
            times.append(model.get_total_time())
        except (Llm.Error, AssertionError, ZeroDivisionError):
            continue
    return min(times, default=None)


def with_fastest_candidate(row: dict[str, Any]) -> dict[str, Any]:
    """The row with only its fastest candidate: scaling a system rarely changes which one that is."""
    one = [(seconds(row | {"executions": [execution]}, UNSCALED), execution) for execution in row["executions"]]
    best = min((pair for pair in one if pair[0]), key=lambda pair: pair[0] or 0.0, default=(None, row["executions"][0]))
    return row | {"executions": [best[1]]}


def tuned(rows: list[dict[str, Any]]) -> tuple[float, ...]:
    from scipy.optimize import least_squares

    def loss(x: Any) -> list[float]:
        result = []
        for row in rows:
            found = seconds(row, tuple(math.exp(v) for v in x))
            miss = (math.log(found / row["measured_s"]) if found else REFUSED_LOG_ERROR) / NOISE
            result.append(row["weight"] * math.copysign(math.sqrt(2 * (math.sqrt(1 + miss**2) - 1)), miss))
        return result

    found = least_squares(loss, [0.0] * 4, bounds=(LOW, HIGH), diff_step=0.02, max_nfev=MAX_EVALUATIONS)
    return tuple(math.exp(v) for v in found.x)


if __name__ == "__main__":
    main()
