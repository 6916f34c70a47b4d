"""The words of a collective: steps, schedules of them, and how much a codec leaves of the bytes.

A step sends, receives, reduces or copies a range of a buffer. Steps of one *stage* run together, stages one after
another. Offsets and counts are in elements; in the wire buffer, which holds encoded data, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from lakh.errors import UserError

__all__ = [
    "ALGORITHMS",
    "GROUP",
    "Buffer",
    "Kind",
    "Schedule",
    "Step",
    "Steps",
    "check",
    "codec_bytes",
    "cuts",
    "share",
]

ALGORITHMS = ("flat", "halving_doubling", "ring", "hierarchical")
GROUP = 32
"""Elements that share one scale in the int8 and int4 codecs."""


class Kind(IntEnum):
    """What a step does. The numbers are those of native/include/lakh_c3.h."""

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
class Step:
    stage: int
    kind: Kind
    peer: int = -1
    src: Buffer = Buffer.OUTPUT
    dst: Buffer = Buffer.OUTPUT
    fan: int = 0
    src_offset: int = 0
    dst_offset: int = 0
    count: int = 0


@dataclass(frozen=True)
class Schedule:
    """What one rank does in one operation."""

    name: str
    steps: tuple[Step, ...]
    scratch_count: int = 0
    wire_bytes: int = 0
    codec: str = "none"

    @property
    def num_stages(self) -> int:
        """Stages in which this rank talks to another."""
        talk = (Kind.SEND, Kind.RECV, Kind.RECV_REDUCE)
        return len({step.stage for step in self.steps if step.kind in talk})

    def bytes_sent(self, width: int, to: Sequence[int] | None = None) -> int:
        """Bytes that this rank puts on the network, to the ranks `to` (all of them if not given)."""
        return sum(
            step.count * (1 if step.src == Buffer.WIRE else width)
            for step in self.steps
            if step.kind == Kind.SEND and (to is None or step.peer in to)
        )


def share(count: int, index: int, parts: int) -> int:
    """Where part `index` of `count` elements begins. Parts differ by at most one element."""
    return count * index // parts


def cuts(count: int, parts: int, rates: Sequence[float] | None = None) -> list[int]:
    """Where the parts of `count` elements begin, and where the last one ends; smaller parts for slower ranks.

    Who owns a part w (of 1) of a flat all_reduce among P ranks sends 1 - w to be added up and then w to P - 1 others,
    and receives as much: 1 + (P - 2) w each way, at once where the buffer goes in pieces. At a rate r that takes
    (1 + (P - 2) w) / r, and the parts are such that the slowest rank ends as early as it can: all that own something
    end together, and who cannot keep up even with nothing owns nothing. With two ranks parts change nothing.
    """
    if rates is None or parts <= 2 or len(set(rates)) == 1:
        return [share(count, index, parts) for index in range(parts + 1)]
    owners = list(range(parts))
    while True:
        end = (parts - 2 + len(owners)) / sum(rates[index] for index in owners)
        able = [index for index in owners if end * rates[index] > 1]
        if len(able) == len(owners):
            break
        owners = able
    found, total = [0], 0.0
    for index in range(parts):
        total += (end * rates[index] - 1) / (parts - 2) if index in owners else 0.0
        found.append(min(count, round(count * total)))
    found[-1] = count
    return found


def codec_bytes(codec: str, count: int) -> int:
    """Bytes on the wire, scales included, of `count` float32 elements."""
    groups = -(-count // GROUP)
    sizes = {"none": 4 * count, "bf16": 2 * count, "int8": 34 * groups, "int4": 18 * groups}
    if codec not in sizes:
        raise UserError(f"codec {codec!r}", "no such codec", f"choose from: {', '.join(sizes)}")
    return sizes[codec]


class Steps:
    """Steps in the making, and how much scratch they need."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.stage = 0
        self.scratch_count = 0
        self.wire_bytes = 0

    def next_stage(self) -> None:
        self.stage += 1

    def send(self, peer: int, offset: int, count: int, src: Buffer = Buffer.OUTPUT) -> None:
        if count:
            self.steps.append(Step(self.stage, Kind.SEND, peer, src=src, src_offset=offset, count=count))

    def recv(self, peer: int, offset: int, count: int, dst: Buffer = Buffer.OUTPUT) -> None:
        if count:
            self.steps.append(Step(self.stage, Kind.RECV, peer, dst=dst, dst_offset=offset, count=count))

    def recv_reduce(self, peer: int, offset: int, count: int, dst: Buffer = Buffer.OUTPUT) -> None:
        if count:
            self.steps.append(Step(self.stage, Kind.RECV_REDUCE, peer, dst=dst, dst_offset=offset, count=count))

    def local(
        self, kind: Kind, src: Buffer, src_offset: int, dst: Buffer, dst_offset: int, count: int, fan: int = 0
    ) -> None:
        if count:
            self.steps.append(
                Step(
                    self.stage,
                    kind,
                    src=src,
                    dst=dst,
                    fan=fan,
                    src_offset=src_offset,
                    dst_offset=dst_offset,
                    count=count,
                )
            )

    def scratch(self, count: int) -> None:
        self.scratch_count = max(self.scratch_count, count)

    def done(self, name: str, codec: str = "none") -> Schedule:
        return Schedule(name, tuple(self.steps), self.scratch_count, self.wire_bytes, codec)


def check(algorithm: str, rank: int, size: int, count: int, root: int = 0) -> None:
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm {algorithm!r}", "no such algorithm", f"choose from: {', '.join(ALGORITHMS)}")
    if not 0 <= rank < size or not 0 <= root < size or count < 0:
        raise UserError("schedule", f"rank {rank} of {size}, root {root}, {count} elements", "mend the numbers")
