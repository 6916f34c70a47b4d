"""Data types of a collective schedule: steps, schedules, the builder, and encoded sizes.

A step sends, receives, reduces or copies a range of a buffer. Steps of one *stage* run concurrently; stages run one
after another. Offsets and counts are in elements; in the wire buffer, which holds encoded data, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lakh.errors import UserError

__all__ = ["ALGORITHMS", "Buffer", "Schedule", "ScheduleBuilder", "ScheduleStep", "StepKind", "codec_bytes"]

ALGORITHMS = ("flat", "halving_doubling", "ring", "hierarchical")
CODEC_GROUP = 32
"""Elements that share one scale in the int8 and int4 codecs."""


class StepKind(IntEnum):
    """What a step does. The values equal those in native/include/lakh_c3.h."""

    SEND = 0
    RECV = 1
    RECV_REDUCE = 2
    COPY = 3
    FOLD = 4
    HOST_REDUCE_SCATTER = 5
    HOST_ALL_GATHER = 6
    HOST_BROADCAST = 7
    ENCODE = 8
    DECODE = 9
    DECODE_REDUCE = 10


class Buffer(IntEnum):
    OUTPUT = 0
    INPUT = 1
    SCRATCH = 2
    WIRE = 3


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    stage: int
    kind: StepKind
    peer: int = -1
    src: Buffer = Buffer.OUTPUT
    dst: Buffer = Buffer.OUTPUT
    fan: int = 0
    src_offset: int = 0
    dst_offset: int = 0
    count: int = 0


@dataclass(frozen=True)
class Schedule:
    """The steps of one rank in one operation."""

    name: str
    steps: tuple[ScheduleStep, ...]
    scratch_count: int = 0
    wire_bytes: int = 0
    codec: str = "none"

    @property
    def num_stages(self) -> int:
        """Number of stages in which this rank communicates."""
        communicates = (StepKind.SEND, StepKind.RECV, StepKind.RECV_REDUCE)
        return len({step.stage for step in self.steps if step.kind in communicates})

    def bytes_sent(self, width: int, to: Sequence[int] | None = None) -> int:
        """Bytes this rank sends to the ranks `to` (default: all), with elements of `width` bytes."""
        return sum(
            step.count * (1 if step.src == Buffer.WIRE else width)
            for step in self.steps
            if step.kind == StepKind.SEND and (to is None or step.peer in to)
        )


def split_points(count: int, parts: int, rates: Sequence[float] | None = None) -> list[int]:
    """Offsets that split `count` elements into `parts`, including the end; parts differ by at most one element.

    With `rates`, slower ranks own smaller parts. In a flat all_reduce among P ranks, the owner of a fraction w sends
    1 - w of the buffer to be reduced and then w to P - 1 ranks, and receives as much: 1 + (P - 2) w in each direction,
    concurrently where the buffer is pipelined. At rate r this takes (1 + (P - 2) w) / r. The fractions minimise the
    slowest rank's time: all owners finish together, and a rank too slow even for w = 0 owns nothing. With two ranks the
    fractions make no difference.
    """
    if rates is None or parts <= 2 or len(set(rates)) == 1:
        return [count * index // parts for index in range(parts + 1)]
    owners = list(range(parts))
    while True:
        finish = (parts - 2 + len(owners)) / sum(rates[index] for index in owners)
        able = [index for index in owners if finish * rates[index] > 1]
        if len(able) == len(owners):
            break
        owners = able
    points, fraction = [0], 0.0
    for index in range(parts):
        fraction += (finish * rates[index] - 1) / (parts - 2) if index in owners else 0.0
        points.append(min(count, round(count * fraction)))
    points[-1] = count
    return points


def codec_bytes(codec: str, count: int) -> int:
    """Encoded size, including scales, of `count` float32 elements."""
    groups = -(-count // CODEC_GROUP)
    sizes = {"none": 4 * count, "bf16": 2 * count, "int8": 34 * groups, "int4": 18 * groups}
    if codec not in sizes:
        raise UserError(f"codec {codec!r}", "no such codec", f"choose from: {', '.join(sizes)}")
    return sizes[codec]


class ScheduleBuilder:
    """Collects the steps of a schedule. Steps of zero elements are dropped."""

    def __init__(self) -> None:
        self.steps: list[ScheduleStep] = []
        self.stage = 0
        self.scratch_count = 0
        self.wire_bytes = 0

    def next_stage(self) -> None:
        self.stage += 1

    def send(self, peer: int, offset: int, count: int, src: Buffer = Buffer.OUTPUT) -> None:
        self._add(StepKind.SEND, count, peer=peer, src=src, src_offset=offset)

    def recv(self, peer: int, offset: int, count: int, dst: Buffer = Buffer.OUTPUT) -> None:
        self._add(StepKind.RECV, count, peer=peer, dst=dst, dst_offset=offset)

    def recv_reduce(self, peer: int, offset: int, count: int, dst: Buffer = Buffer.OUTPUT) -> None:
        self._add(StepKind.RECV_REDUCE, count, peer=peer, dst=dst, dst_offset=offset)

    def local(
        self, kind: StepKind, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, count: int, fan: int = 0
    ) -> None:
        """A step without a peer: copy, fold, encode, decode."""
        self._add(kind, count, src=src, dst=dst, fan=fan, src_offset=src_offset, dst_offset=dst_offset)

    def on_host(self, kind: StepKind, offset: int, count: int, buffer: Buffer = Buffer.OUTPUT) -> None:
        """A stage of its own, executed together by all ranks of the host, in place."""
        self.local(kind, buffer, offset, buffer, offset, count)
        self.next_stage()

    def reserve_scratch(self, count: int) -> None:
        self.scratch_count = max(self.scratch_count, count)

    def finish(self, name: str, codec: str = "none") -> Schedule:
        return Schedule(name, tuple(self.steps), self.scratch_count, self.wire_bytes, codec)

    def _add(self, kind: StepKind, count: int, **fields: Any) -> None:
        if count:
            self.steps.append(ScheduleStep(self.stage, kind, count=count, **fields))


def check_arguments(algorithm: str, rank: int, size: int, count: int, root: int = 0) -> None:
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm {algorithm!r}", "no such algorithm", f"choose from: {', '.join(ALGORITHMS)}")
    if not 0 <= rank < size or not 0 <= root < size or count < 0:
        found = f"rank {rank} of {size}, root {root}, {count} elements"
        raise UserError("schedule", found, "use ranks below the size and a count of 0 or more")


def check_order(order: Sequence[int] | None, size: int) -> list[int]:
    """`order`, or the ranks by number if it is None."""
    ranks = list(order) if order is not None else list(range(size))
    if sorted(ranks) != list(range(size)):
        raise UserError("order", f"{ranks} does not contain each of {size} ranks once", "give a permutation")
    return ranks
