"""Proves schedules: plays all ranks' steps on symbols instead of numbers.

Every element carries two fingerprints: one adds up (which inputs are in it, each how often), the other mixes in the
order
of additions (the form of the expression, where a + b is b + a). A schedule is right when each element holds each input
it should, once, and when the form is the same on every rank, so that floating-point results have the same bits. Chance
of a false "right": about 2**-64 per element.

Also found: receives without a send and the reverse, ranks that wait for each other in a circle, a send and a receive of
one stage that overlap, reads of memory that nobody wrote. Knows nothing of networks or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lakh.errors import UserError
from lakh.spec.collectives import Buffer, Kind, Schedule, Step, share

__all__ = ["Symbols", "leaves", "play"]

Prints = NDArray[np.uint64]
_TALK = (Kind.SEND, Kind.RECV, Kind.RECV_REDUCE)
_HOST = (Kind.HOST_REDUCE_SCATTER, Kind.HOST_ALL_GATHER, Kind.HOST_BROADCAST)


def _mix(values: Prints) -> Prints:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Prints = values ^ (values >> np.uint64(31))
    return mixed


class Symbols:
    """A buffer of expressions: `total` says which inputs, `form` in which order. Zero means nothing was written."""

    def __init__(self, total: Prints, form: Prints) -> None:
        self.total, self.form = total, form

    @staticmethod
    def empty(count: int) -> Symbols:
        return Symbols(np.zeros(count, np.uint64), np.zeros(count, np.uint64))

    def read(self, offset: int, count: int) -> Symbols:
        if offset < 0 or offset + count > len(self.total):
            raise UserError("schedule", f"reads [{offset}, {offset + count}) of {len(self.total)}", "mend the schedule")
        part = Symbols(self.total[offset : offset + count].copy(), self.form[offset : offset + count].copy())
        if (part.form == 0).any():
            raise UserError("schedule", f"reads [{offset}, {offset + count}) before it is written", "mend the schedule")
        return part

    def write(self, offset: int, part: Symbols) -> None:
        count = len(part.total)
        if offset < 0 or offset + count > len(self.total):
            raise UserError("schedule", f"writes [{offset}, {offset + count}) of {len(self.total)}", "mend it")
        self.total[offset : offset + count] = part.total
        self.form[offset : offset + count] = part.form

    def plus(self, other: Symbols) -> Symbols:
        with np.errstate(over="ignore"):
            return Symbols(self.total + other.total, _mix(self.form + other.form + np.uint64(0x9E3779B97F4A7C15)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Symbols)
            and np.array_equal(self.total, other.total)
            and np.array_equal(self.form, other.form)
        )

    __hash__ = None  # type: ignore[assignment]


def leaves(rank: int, count: int) -> Symbols:
    """The input of a rank: each element its own symbol."""
    names = _mix(np.arange(1, count + 1, dtype=np.uint64) + np.uint64((rank + 1) << 40))
    return Symbols(names, _mix(names))


class _Rank:
    def __init__(self, rank: int, schedule: Schedule, output: Symbols, given: Symbols) -> None:
        self.rank = rank
        stages: dict[int, list[Step]] = {}
        for step in schedule.steps:
            stages.setdefault(step.stage, []).append(step)
        self.stages = deque(stages[number] for number in sorted(stages))
        if [step.stage for step in schedule.steps] != sorted(step.stage for step in schedule.steps):
            raise UserError("schedule", "stages are not in order", "mend the schedule")
        scratch = Symbols.empty(schedule.scratch_count)
        self.buffers = {Buffer.OUTPUT: output, Buffer.INPUT: given, Buffer.SCRATCH: scratch}
        self.wire: dict[int, Symbols] = {}  # encoded blocks by their byte offset
        self.wire_size: dict[int, int] = {}
        self.waiting: list[Step] | None = None  # receives of the stage under way

    def load(self, buffer: Buffer, offset: int, count: int) -> Symbols:
        if buffer == Buffer.WIRE:
            if self.wire_size.get(offset, count) != count or offset not in self.wire:
                raise UserError("schedule", f"sends wire bytes at {offset} that no step encoded", "mend the schedule")
            return self.wire[offset]
        return self.buffers[buffer].read(offset, count)


def play(
    schedules: Sequence[Schedule],
    outputs: Sequence[Symbols],
    inputs: Sequence[Symbols],
    hosts: Sequence[str] | None = None,
) -> None:
    """Run all ranks to the end, changing `outputs`. `hosts[r]` names the host of rank r, for the HOST steps."""
    ranks = [_Rank(r, *parts) for r, parts in enumerate(zip(schedules, outputs, inputs, strict=True))]
    teams: dict[str, list[_Rank]] = {}
    for one in ranks:
        teams.setdefault(hosts[one.rank] if hosts else str(one.rank), []).append(one)
    channels: dict[tuple[int, int], deque[tuple[int, Symbols]]] = {}
    while True:
        moved = False
        for one in ranks:
            while one.stages and _advance(one, channels):
                moved = True
        for team in teams.values():
            moved = _host_step(team) or moved
        if not moved:
            break
    stuck = [one.rank for one in ranks if one.stages]
    if stuck:
        raise UserError("schedule", f"ranks {stuck} wait for something that never comes", "mend the schedule")
    if any(channels.values()):
        raise UserError("schedule", "sends something that nobody receives", "mend the schedule")


def _advance(one: _Rank, channels: dict[tuple[int, int], deque[tuple[int, Symbols]]]) -> bool:
    stage = one.stages[0]
    kinds = {step.kind for step in stage}
    if kinds & set(_HOST):
        return False
    if kinds <= set(_TALK):
        if one.waiting is None:
            _no_overlap(stage)
            for step in stage:
                if step.kind == Kind.SEND:
                    part = one.load(step.src, step.src_offset, step.count)
                    channels.setdefault((one.rank, step.peer), deque()).append((step.count, part))
            one.waiting = [step for step in stage if step.kind != Kind.SEND]
        for step in list(one.waiting):
            inbox = channels.get((step.peer, one.rank))
            if not inbox:
                continue
            count, part = inbox.popleft()
            if count != step.count:
                raise UserError("schedule", f"rank {step.peer} sends {count}, rank {one.rank} expects {step.count}", "")
            if step.dst == Buffer.WIRE:
                one.wire[step.dst_offset], one.wire_size[step.dst_offset] = part, count
            elif step.kind == Kind.RECV:
                one.buffers[step.dst].write(step.dst_offset, part)
            else:
                held = one.buffers[step.dst].read(step.dst_offset, step.count)
                one.buffers[step.dst].write(step.dst_offset, held.plus(part))
            one.waiting.remove(step)
        if one.waiting:
            return False
        one.waiting = None
    elif kinds & set(_TALK):
        raise UserError("schedule", "talks and computes in one stage", "split the stage")
    else:
        for step in stage:
            _compute(one, step)
    one.stages.popleft()
    return True


def _compute(one: _Rank, step: Step) -> None:
    if step.kind == Kind.COPY:
        one.buffers[step.dst].write(step.dst_offset, one.load(step.src, step.src_offset, step.count))
    elif step.kind == Kind.FOLD:
        parts = [one.load(step.src, step.src_offset + k * step.count, step.count) for k in range(step.fan)]
        total = parts[0]
        for part in parts[1:]:
            total = total.plus(part)
        one.buffers[step.dst].write(step.dst_offset, total)
    elif step.kind == Kind.ENCODE:
        part = one.load(step.src, step.src_offset, step.count)
        one.wire[step.dst_offset] = Symbols(part.total, _mix(part.form ^ np.uint64(0xC0DEC)))
        one.wire_size.pop(step.dst_offset, None)  # its bytes are known to the sender's codec, not to us
    elif step.kind in (Kind.DECODE, Kind.DECODE_REDUCE):
        part = one.wire[step.src_offset]
        if len(part.total) != step.count:
            raise UserError("schedule", f"decodes {step.count} elements of {len(part.total)}", "mend the schedule")
        if step.kind == Kind.DECODE_REDUCE:
            part = one.buffers[step.dst].read(step.dst_offset, step.count).plus(part)
        one.buffers[step.dst].write(step.dst_offset, part)


def _host_step(team: list[_Rank]) -> bool:
    """A step of all ranks of a host together, once all of them have come to it."""
    steps = [one.stages[0][0] if one.stages else None for one in team]
    if not all(step is not None and step.kind in _HOST for step in steps):
        return False
    first = steps[0]
    assert first is not None
    low, count, parts = first.dst_offset, first.count, len(team)
    if any(s is not None and (s.kind, s.dst_offset, s.count) != (first.kind, low, count) for s in steps):
        raise UserError("schedule", "ranks of a host take different steps together", "mend the schedule")
    data = [one.buffers[first.dst] for one in team]
    if first.kind == Kind.HOST_BROADCAST:
        part = data[first.fan].read(low, count)
        for buffer in data:
            buffer.write(low, part)
    else:
        for place in range(parts):
            begin = low + share(count, place, parts)
            width = low + share(count, place + 1, parts) - begin
            if first.kind == Kind.HOST_ALL_GATHER:
                part = data[place].read(begin, width)
                for buffer in data:
                    buffer.write(begin, part)
            else:
                total = data[0].read(begin, width)
                for buffer in data[1:]:
                    total = total.plus(buffer.read(begin, width))
                data[place].write(begin, total)
    for one in team:
        one.stages.popleft()
    return True


def _no_overlap(stage: Sequence[Step]) -> None:
    reads = [(s.src, s.src_offset, s.src_offset + s.count) for s in stage if s.kind == Kind.SEND]
    writes = [(s.dst, s.dst_offset, s.dst_offset + s.count) for s in stage if s.kind != Kind.SEND]
    for index, (buffer, begin, end) in enumerate(writes):
        for other, low, high in reads + writes[index + 1 :]:
            if buffer == other and begin < high and low < end:
                raise UserError("schedule", f"touches [{low}, {high}) twice in one stage", "split the stage")
