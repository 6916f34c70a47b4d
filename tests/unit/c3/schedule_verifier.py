"""Proves schedules correct by executing all ranks' steps on symbols instead of numbers.

Every element carries two fingerprints: one is additive (which inputs it contains, and how often), the other depends on
the order of additions (the form of the expression, where a + b equals b + a). A schedule is correct if each element
contains each expected input once and the form is the same on every rank, so that floating-point results are
bit-identical. The probability of a false proof is about 2**-64 per element.

Also detects unmatched sends and receives, deadlocks, overlapping ranges in one stage, and reads of unwritten memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lakh.errors import UserError
from lakh.spec.schedule import Buffer, Schedule, ScheduleStep, StepKind, split_points

__all__ = ["SymbolicBuffer", "rank_input", "run_symbolically"]

Prints = NDArray[np.uint64]
_COMMUNICATION = (StepKind.SEND, StepKind.RECV, StepKind.RECV_REDUCE)
_HOST_KINDS = (StepKind.HOST_REDUCE_SCATTER, StepKind.HOST_ALL_GATHER, StepKind.HOST_BROADCAST)


def _mix(values: Prints) -> Prints:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Prints = values ^ (values >> np.uint64(31))
    return mixed


class SymbolicBuffer:
    """A buffer of expressions: `total` fingerprints the inputs, `form` their order. Zero means unwritten."""

    def __init__(self, total: Prints, form: Prints) -> None:
        self.total, self.form = total, form

    @staticmethod
    def empty(count: int) -> SymbolicBuffer:
        return SymbolicBuffer(np.zeros(count, np.uint64), np.zeros(count, np.uint64))

    def read(self, offset: int, count: int) -> SymbolicBuffer:
        if offset < 0 or offset + count > len(self.total):
            raise UserError(
                "schedule", f"reads [{offset}, {offset + count}) of {len(self.total)}", "correct the schedule"
            )
        part = SymbolicBuffer(self.total[offset : offset + count].copy(), self.form[offset : offset + count].copy())
        if (part.form == 0).any():
            raise UserError(
                "schedule", f"reads [{offset}, {offset + count}) before it is written", "correct the schedule"
            )
        return part

    def write(self, offset: int, part: SymbolicBuffer) -> None:
        count = len(part.total)
        if offset < 0 or offset + count > len(self.total):
            raise UserError(
                "schedule", f"writes [{offset}, {offset + count}) of {len(self.total)}", "correct the schedule"
            )
        self.total[offset : offset + count] = part.total
        self.form[offset : offset + count] = part.form

    def plus(self, other: SymbolicBuffer) -> SymbolicBuffer:
        with np.errstate(over="ignore"):
            return SymbolicBuffer(
                self.total + other.total, _mix(self.form + other.form + np.uint64(0x9E3779B97F4A7C15))
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SymbolicBuffer)
            and np.array_equal(self.total, other.total)
            and np.array_equal(self.form, other.form)
        )

    __hash__ = None  # type: ignore[assignment]


def rank_input(rank: int, count: int) -> SymbolicBuffer:
    """The input of a rank: a unique symbol for each element."""
    names = _mix(np.arange(1, count + 1, dtype=np.uint64) + np.uint64((rank + 1) << 40))
    return SymbolicBuffer(names, _mix(names))


class _SymbolicRank:
    def __init__(self, rank: int, schedule: Schedule, output: SymbolicBuffer, source: SymbolicBuffer) -> None:
        self.rank = rank
        stages: dict[int, list[ScheduleStep]] = {}
        for step in schedule.steps:
            stages.setdefault(step.stage, []).append(step)
        self.stages = deque(stages[number] for number in sorted(stages))
        if [step.stage for step in schedule.steps] != sorted(step.stage for step in schedule.steps):
            raise UserError("schedule", "stages are not in order", "fix it")
        scratch = SymbolicBuffer.empty(schedule.scratch_count)
        self.buffers = {Buffer.OUTPUT: output, Buffer.INPUT: source, Buffer.SCRATCH: scratch}
        self.wire: dict[int, SymbolicBuffer] = {}  # encoded blocks by their byte offset
        self.wire_size: dict[int, int] = {}
        self.waiting: list[ScheduleStep] | None = None  # receives of the stage under way

    def load(self, buffer: Buffer, offset: int, count: int) -> SymbolicBuffer:
        if buffer == Buffer.WIRE:
            if self.wire_size.get(offset, count) != count or offset not in self.wire:
                raise UserError(
                    "schedule", f"sends wire bytes at {offset} that no step has encoded", "correct the schedule"
                )
            return self.wire[offset]
        return self.buffers[buffer].read(offset, count)


def run_symbolically(
    schedules: Sequence[Schedule],
    outputs: Sequence[SymbolicBuffer],
    inputs: Sequence[SymbolicBuffer],
    hosts: Sequence[str] | None = None,
) -> None:
    """Execute the schedules of all ranks, updating `outputs`. `hosts[r]` is the host of rank r, for HOST steps."""
    ranks = [_SymbolicRank(r, *parts) for r, parts in enumerate(zip(schedules, outputs, inputs, strict=True))]
    by_host: dict[str, list[_SymbolicRank]] = {}
    for state in ranks:
        by_host.setdefault(hosts[state.rank] if hosts else str(state.rank), []).append(state)
    channels: dict[tuple[int, int], deque[tuple[int, SymbolicBuffer]]] = {}
    while True:
        moved = False
        for state in ranks:
            while state.stages and _advance(state, channels):
                moved = True
        for ranks_of_host in by_host.values():
            moved = _host_step(ranks_of_host) or moved
        if not moved:
            break
    stuck = [state.rank for state in ranks if state.stages]
    if stuck:
        raise UserError("schedule", f"ranks {stuck} wait for data that is never sent", "fix it")
    if any(channels.values()):
        raise UserError("schedule", "sends data that no rank receives", "fix it")


def _advance(state: _SymbolicRank, channels: dict[tuple[int, int], deque[tuple[int, SymbolicBuffer]]]) -> bool:
    stage = state.stages[0]
    kinds = {step.kind for step in stage}
    if kinds & set(_HOST_KINDS):
        return False
    if kinds <= set(_COMMUNICATION):
        if state.waiting is None:
            _no_overlap(stage)
            for step in stage:
                if step.kind == StepKind.SEND:
                    part = state.load(step.src, step.src_offset, step.count)
                    channels.setdefault((state.rank, step.peer), deque()).append((step.count, part))
            state.waiting = [step for step in stage if step.kind != StepKind.SEND]
        for step in list(state.waiting):
            inbox = channels.get((step.peer, state.rank))
            if not inbox:
                continue
            count, part = inbox.popleft()
            if count != step.count:
                raise UserError(
                    "schedule", f"rank {step.peer} sends {count}, rank {state.rank} expects {step.count}", ""
                )
            if step.dst == Buffer.WIRE:
                state.wire[step.dst_offset], state.wire_size[step.dst_offset] = part, count
            elif step.kind == StepKind.RECV:
                state.buffers[step.dst].write(step.dst_offset, part)
            else:
                current = state.buffers[step.dst].read(step.dst_offset, step.count)
                state.buffers[step.dst].write(step.dst_offset, current.plus(part))
            state.waiting.remove(step)
        if state.waiting:
            return False
        state.waiting = None
    elif kinds & set(_COMMUNICATION):
        raise UserError("schedule", "communicates and computes in one stage", "split the stage")
    else:
        for step in stage:
            _compute(state, step)
    state.stages.popleft()
    return True


def _compute(state: _SymbolicRank, step: ScheduleStep) -> None:
    if step.kind == StepKind.COPY:
        state.buffers[step.dst].write(step.dst_offset, state.load(step.src, step.src_offset, step.count))
    elif step.kind == StepKind.FOLD:
        parts = [state.load(step.src, step.src_offset + k * step.count, step.count) for k in range(step.fan)]
        total = parts[0]
        for part in parts[1:]:
            total = total.plus(part)
        state.buffers[step.dst].write(step.dst_offset, total)
    elif step.kind == StepKind.ENCODE:
        part = state.load(step.src, step.src_offset, step.count)
        state.wire[step.dst_offset] = SymbolicBuffer(part.total, _mix(part.form ^ np.uint64(0xC0DEC)))
        state.wire_size.pop(step.dst_offset, None)  # only the sender's codec determines the size
    elif step.kind in (StepKind.DECODE, StepKind.DECODE_REDUCE):
        part = state.wire[step.src_offset]
        if len(part.total) != step.count:
            raise UserError("schedule", f"decodes {step.count} elements of {len(part.total)}", "fix it")
        if step.kind == StepKind.DECODE_REDUCE:
            part = state.buffers[step.dst].read(step.dst_offset, step.count).plus(part)
        state.buffers[step.dst].write(step.dst_offset, part)


def _host_step(ranks_of_host: list[_SymbolicRank]) -> bool:
    """Executes a step of all ranks of a host together, once all have reached it."""
    steps = [state.stages[0][0] if state.stages else None for state in ranks_of_host]
    if not all(step is not None and step.kind in _HOST_KINDS for step in steps):
        return False
    first = steps[0]
    assert first is not None
    low, count = first.dst_offset, first.count
    if any(s is not None and (s.kind, s.dst_offset, s.count) != (first.kind, low, count) for s in steps):
        raise UserError("schedule", "ranks of a host execute different host steps", "fix it")
    data = [state.buffers[first.dst] for state in ranks_of_host]
    if first.kind == StepKind.HOST_BROADCAST:
        part = data[first.fan].read(low, count)
        for buffer in data:
            buffer.write(low, part)
    else:
        at = split_points(count, len(ranks_of_host))
        for place in range(len(ranks_of_host)):
            begin, width = low + at[place], at[place + 1] - at[place]
            if first.kind == StepKind.HOST_ALL_GATHER:
                part = data[place].read(begin, width)
                for buffer in data:
                    buffer.write(begin, part)
            else:
                total = data[0].read(begin, width)
                for buffer in data[1:]:
                    total = total.plus(buffer.read(begin, width))
                data[place].write(begin, total)
    for state in ranks_of_host:
        state.stages.popleft()
    return True


def _no_overlap(stage: Sequence[ScheduleStep]) -> None:
    reads = [(s.src, s.src_offset, s.src_offset + s.count) for s in stage if s.kind == StepKind.SEND]
    writes = [(s.dst, s.dst_offset, s.dst_offset + s.count) for s in stage if s.kind != StepKind.SEND]
    for index, (buffer, begin, end) in enumerate(writes):
        for other, low, high in reads + writes[index + 1 :]:
            if buffer == other and begin < high and low < end:
                raise UserError("schedule", f"touches [{low}, {high}) twice in one stage", "split the stage")
