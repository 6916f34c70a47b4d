"""Seconds of a pipelined step with many micro-batches, from a timeline of a few of them.

Long steps repeat themselves: a timeline of a few rounds of micro-batches is extended by the time of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lakh.planner.schedules.operations import PipelineSchedule
from lakh.planner.schedules.timeline import OperationSeconds, simulate_schedule

__all__ = ["ROUNDS", "long_step_s"]

ROUNDS = 3
"""Of micro-batches, one per stage, that a timeline simulates before it is extended."""


def long_step_s(
    schedule_of: Callable[[int], PipelineSchedule], stages: int, micro_batches: int, seconds: OperationSeconds,
    delays: Sequence[float], rounds: int = ROUNDS,
) -> float:  # fmt: skip
    """The time of all micro-batches; `schedule_of` is a schedule by its number of micro-batches."""
    few = rounds * stages + micro_batches % stages
    more = few + 2 * stages  # some orders repeat after two rounds
    if micro_batches > more:
        short, long = (long_step_s(schedule_of, stages, m, seconds, delays, rounds + 2) for m in (few, more))
        return long + (micro_batches - more) * (long - short) / (more - few)
    return simulate_schedule(schedule_of(micro_batches), seconds, delays).total_s
