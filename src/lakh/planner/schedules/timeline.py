"""When every operation of a pipeline schedule runs, for given durations and delays between ranks.

A rank computes its operations in order, each as soon as its input has arrived. A forward pass needs the one before it
in the model, a backward pass the one after it and its own forward pass. Sends take no time of the sender: a delay is
the time from the end of an operation until its result has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lakh.errors import UserError
from lakh.planner.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, PipelineSchedule

__all__ = ["OperationSeconds", "PipelineTimeline", "TimedOperation", "simulate_schedule"]


@dataclass(frozen=True, kw_only=True)
class OperationSeconds:
    """Of one micro-batch on all stages of a rank."""

    forward: float
    input: float
    weight: float

    def __post_init__(self) -> None:
        if min(self.forward, self.input, self.weight) < 0 or self.forward + self.input + self.weight <= 0:
            raise UserError("durations of a pipeline", f"{self} is not a positive time", "give seconds")

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight

    def of(self, kind: str) -> float:
        backward = self.input + self.weight
        return {FORWARD: self.forward, BACKWARD: backward, INPUT: self.input, WEIGHT: self.weight}[kind]


@dataclass(frozen=True)
class TimedOperation:
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineTimeline:
    schedule: PipelineSchedule
    ranks: tuple[tuple[TimedOperation, ...], ...]
    ideal_s: float
    """Work of a rank, without a bubble."""

    @property
    def total_s(self) -> float:
        return max(rank[-1].end_s for rank in self.ranks)

    @property
    def bubble_share(self) -> float:
        """Idle share of the step."""
        return 1 - self.ideal_s / self.total_s

    def idle_s(self, rank: int) -> float:
        """Idle time of a rank between its first and its last operation."""
        here = self.ranks[rank]
        return here[-1].end_s - here[0].start_s - sum(one.end_s - one.start_s for one in here)

    def peak_in_flight(self, rank: int) -> float:
        """Most micro-batches of which a rank holds activations, from the start of the forward pass to the end of the
        backward pass. An operation on one of several stages counts as a part."""
        steps = []
        for one in self.ranks[rank]:
            if one.operation.kind == FORWARD:
                steps.append((one.start_s, 1))
            elif one.operation.kind != INPUT:
                steps.append((one.end_s, -1))
        held = peak = 0
        for _, change in sorted(steps):  # an end at the time of a start comes first
            held += change
            peak = max(peak, held)
        return peak / self.schedule.stages_per_rank


def simulate_schedule(
    schedule: PipelineSchedule, seconds: OperationSeconds, delays: Sequence[float] = ()
) -> PipelineTimeline:
    """The timeline of a schedule. `delays` are seconds between neighbouring ranks (default: none); between other ranks
    the delays on the way add up."""
    p = schedule.ranks
    if delays and (len(delays) != p - 1 or min(delays) < 0):
        raise UserError("delays of a pipeline", f"{list(delays)} for {p} ranks", f"give {p - 1} numbers, none negative")
    reach = [0.0]
    for delay in delays or [0.0] * (p - 1):
        reach.append(reach[-1] + delay)
    lasts = {kind: seconds.of(kind) / schedule.stages_per_rank for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}
    forward_end: dict[tuple[int, int], float] = {}
    backward_end: dict[tuple[int, int], float] = {}
    done: list[list[TimedOperation]] = [[] for _ in range(p)]
    clock, remaining = [0.0] * p, sum(map(len, schedule.operations))
    stage_ranks, operations = schedule.stage_ranks, schedule.operations

    def ready_s(operation: Operation, rank: int) -> float | None:
        """When the input of an operation has arrived; None if it was not computed yet."""
        kind, stage, micro_batch = operation
        if kind == WEIGHT:
            return backward_end.get((stage, micro_batch))
        if kind == FORWARD:
            if schedule.is_first(stage):
                return 0.0
            other, end_s = stage - 1, forward_end.get((stage - 1, micro_batch))
        else:
            if (stage, micro_batch) not in forward_end:
                return None
            if schedule.is_last(stage):
                return forward_end[stage, micro_batch]
            other, end_s = stage + 1, backward_end.get((stage + 1, micro_batch))
        return None if end_s is None else end_s + abs(reach[stage_ranks[other]] - reach[rank])

    while remaining:
        before = remaining
        for rank, order in enumerate(operations):
            here = done[rank]
            while len(here) < len(order):
                operation = order[len(here)]
                ready = ready_s(operation, rank)
                if ready is None:
                    break
                start_s = max(clock[rank], ready)
                clock[rank] = start_s + lasts[operation.kind]
                here.append(TimedOperation(operation, start_s, clock[rank]))
                remaining -= 1
                if operation.kind == FORWARD:
                    forward_end[operation.stage, operation.micro_batch] = clock[rank]
                elif operation.kind != WEIGHT:
                    backward_end[operation.stage, operation.micro_batch] = clock[rank]
        if remaining == before:
            blocked = next(
                order[len(here)] for here, order in zip(done, operations, strict=True) if len(here) < len(order)
            )
            raise UserError(f"schedule {schedule.name}", f"waits for ever before {blocked}", "give a valid order")
    ideal_s = schedule.micro_batches * seconds.total
    return PipelineTimeline(schedule, tuple(map(tuple, done)), ideal_s)
