"""Pipeline schedules on real processes, beside their simulated timelines.

Every rank is a process that computes its operations in the order of the schedule and sends every result to the rank
that needs it. An operation waits for a fixed time, as a host waits for its GPU, or is a loop of matrix products. Its
duration is measured before the pipeline runs, on all ranks at the same time, and the timeline is computed from it:
nothing is taken from the pipeline's own times. A delay between ranks is the time for which a receiver holds a message
back.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from lakh.errors import PeerTimeout
from lakh.planner.schedules.operations import BACKWARD, FORWARD, WEIGHT, Operation, PipelineSchedule
from lakh.planner.schedules.orders import build_schedule, extra_warm_up
from lakh.planner.schedules.timeline import OperationSeconds, simulate_schedule

__all__ = ["compare_schedules", "run_pipeline"]

MESSAGE_TIMEOUT_S = 60.0
CALIBRATION_OPERATIONS = 40
WARM_UP_STEPS = 1
MATRIX = 192
"""Rows of the matrices of an operation: small enough for a core's cache."""
PRODUCTS = 40
WAIT_S = 0.01
"""Of a forward pass on a rank: matrix products, or seconds."""
DELAY_S = 0.02
Pipes = dict[int, Connection]


class Worker:
    """One rank: computes, sends, and holds what has arrived until it is needed."""

    def __init__(self, rank: int, schedule: PipelineSchedule, delays: list[float], pipes: Pipes, waits: bool) -> None:
        self.rank, self.schedule, self.pipes, self.waits = rank, schedule, pipes, waits
        self.delays = delays
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.matrix = np.full((MATRIX, MATRIX), 1.0 / MATRIX, dtype=np.float32)

    def compute(self, kind: str) -> None:
        parts = (2 if kind == BACKWARD else 1) / self.schedule.stages_per_rank
        if self.waits:
            time.sleep(WAIT_S * parts)
            return
        for _ in range(round(PRODUCTS * parts)):
            np.dot(self.matrix, self.matrix, out=np.empty_like(self.matrix))

    def operation_s(self) -> float:
        """Median seconds of a forward pass on all stages of the rank."""
        times = []
        for _ in range(CALIBRATION_OPERATIONS):
            began = time.monotonic()
            for _ in range(self.schedule.stages_per_rank):
                self.compute(FORWARD)
            times.append(time.monotonic() - began)
        return statistics.median(times)

    def step(self) -> None:
        self.arrived.clear()
        for operation in self.schedule.operations[self.rank]:
            self.wait_for_input(operation)
            self.compute(operation.kind)
            self.send(operation)

    def wait_for_input(self, operation: Operation) -> None:
        kind, stage, micro_batch = operation
        if kind == WEIGHT:
            return
        is_forward = kind == FORWARD
        if self.schedule.is_first(stage) if is_forward else self.schedule.is_last(stage):
            return
        source = stage - 1 if is_forward else stage + 1
        needed = (FORWARD if is_forward else BACKWARD, source, micro_batch)
        peer = self.schedule.stage_ranks[source]
        while peer != self.rank and needed not in self.arrived:
            if not self.pipes[peer].poll(MESSAGE_TIMEOUT_S):
                raise PeerTimeout(f"rank {self.rank}", f"{operation} got no input from rank {peer}", "run again")
            message, sent_s = self.pipes[peer].recv()
            self.arrived[message] = sent_s
        if peer != self.rank:
            between = sum(self.delays[min(peer, self.rank) : max(peer, self.rank)])
            time.sleep(max(self.arrived.pop(needed) + between - time.monotonic(), 0.0))

    def send(self, operation: Operation) -> None:
        kind, stage, micro_batch = operation
        if kind == WEIGHT or (self.schedule.is_last(stage) if kind == FORWARD else self.schedule.is_first(stage)):
            return
        target = self.schedule.stage_ranks[stage + 1 if kind == FORWARD else stage - 1]
        if target != self.rank:
            message = (FORWARD if kind == FORWARD else BACKWARD, stage, micro_batch)
            self.pipes[target].send((message, time.monotonic()))


def _work(worker: Worker, barrier: Any, steps: int, answer: Connection) -> None:
    barrier.wait(MESSAGE_TIMEOUT_S)
    operation_s = worker.operation_s()
    times = []
    for _ in range(WARM_UP_STEPS + steps):
        barrier.wait(MESSAGE_TIMEOUT_S)
        began = time.monotonic()
        worker.step()
        times.append((began, time.monotonic()))
    answer.send((operation_s, times[WARM_UP_STEPS:]))


def run_pipeline(
    schedule: PipelineSchedule, delays: list[float], steps: int, waits: bool
) -> tuple[OperationSeconds, float]:
    """Seconds of an operation, measured before, and the median seconds of a step, from first start to last end."""
    context = multiprocessing.get_context("spawn")
    ranks, barrier = range(schedule.ranks), context.Barrier(schedule.ranks)
    pipes: list[Pipes] = [{} for _ in ranks]
    for a in ranks:
        for b in range(a + 1, schedule.ranks):
            pipes[a][b], pipes[b][a] = context.Pipe()
    answers, processes = [], []
    for rank in ranks:
        ours, theirs = context.Pipe(duplex=False)
        worker = Worker(rank, schedule, delays, pipes[rank], waits)
        processes.append(context.Process(target=_work, args=(worker, barrier, steps, theirs), daemon=True))
        answers.append(ours)
    try:
        for process in processes:
            process.start()
        found = []
        for rank, answer in enumerate(answers):
            if not answer.poll(MESSAGE_TIMEOUT_S * (steps + 1)):
                raise PeerTimeout(f"rank {rank}", "did not finish its steps", "use fewer ranks or smaller operations")
            found.append(answer.recv())
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
    operation_s = max(seconds for seconds, _ in found)
    by_step = zip(*(times for _, times in found), strict=True)
    steps_s = [max(end for _, end in step) - min(start for start, _ in step) for step in by_step]
    half = OperationSeconds(forward=operation_s, input=operation_s, weight=operation_s)
    return half, statistics.median(steps_s)


def compare_schedules(
    ranks: int, micro_batches: int, *, waits: bool, steps: int = 5, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Every schedule on real processes: predicted and measured seconds of a step, without and with a slow boundary."""
    rows = []
    for delayed in (False, True):
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "1f1b, deeper warm-up"):
            if name.endswith("warm-up") and not delayed:
                continue
            progress(f"{name}{', slow boundary' if delayed else ''}")
            chunks = 2 if name == "interleaved" else 1
            delays = [0.0] * (ranks - 1)
            if delayed:
                delays[(ranks - 1) // 2] = DELAY_S
            warm_up = extra_warm_up(delays, 3 * WAIT_S) if name.endswith("warm-up") else ()
            schedule = build_schedule(name.split(",")[0], ranks, micro_batches, chunks, warm_up)
            seconds, measured_s = run_pipeline(schedule, delays, steps, waits)
            predicted_s = simulate_schedule(schedule, seconds, delays).total_s
            rows.append(
                {"schedule": name, "ranks": ranks, "micro_batches": micro_batches, "delay_ms": 1e3 * max(delays),
                 "operation_ms": 1e3 * seconds.forward, "predicted_s": predicted_s, "measured_s": measured_s,
                 "error": predicted_s / measured_s - 1}
            )  # fmt: skip
    return rows
