"""Steps of the reduction algorithms: flat, ring, halving-doubling, encoded and pipelined.

Each function adds steps that work in place on the range [low, low + count) of OUTPUT. `ranks` lists the participants in
an order that all of them use, `me` is this rank's index in it, and `at` are the split points of the range, one part per
participant. reductions.py combines them into operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lakh.spec.schedule import Buffer, ScheduleBuilder, StepKind, codec_bytes, split_points

__all__ = ["PIPELINE_CHUNKS", "all_gather_flat", "all_reduce_range", "reduce_scatter_flat", "ring_pass"]

PIPELINE_CHUNKS = 16
"""Chunks of a pipelined all_reduce. The first scatter and the last gather overlap nothing, so each is small."""


def reduce_scatter_flat(build: ScheduleBuilder, ranks: Sequence[int], me: int, low: int, at: Sequence[int]) -> None:
    """Reduces part `me` in the order of `ranks`, with one rounding."""
    width = at[me + 1] - at[me]
    for index, peer in enumerate(ranks):
        if index != me:
            build.send(peer, low + at[index], at[index + 1] - at[index])
            build.recv(peer, index * width, width, Buffer.SCRATCH)
    build.next_stage()
    _fold_own_part(build, len(ranks), me, low, at)


def _fold_own_part(build: ScheduleBuilder, parts: int, me: int, low: int, at: Sequence[int]) -> None:
    width = at[me + 1] - at[me]
    build.reserve_scratch(parts * width)
    build.local(StepKind.COPY, Buffer.OUTPUT, low + at[me], Buffer.SCRATCH, me * width, width)
    build.local(StepKind.FOLD, Buffer.SCRATCH, 0, Buffer.OUTPUT, low + at[me], width, fan=parts)
    build.next_stage()


def all_gather_flat(build: ScheduleBuilder, ranks: Sequence[int], me: int, low: int, at: Sequence[int]) -> None:
    for index, peer in enumerate(ranks):
        if index != me:
            build.send(peer, low + at[me], at[me + 1] - at[me])
            build.recv(peer, low + at[index], at[index + 1] - at[index])
    build.next_stage()


def ring_pass(
    build: ScheduleBuilder,
    ranks: Sequence[int],
    me: int,
    low: int,
    at: Sequence[int],
    reduces: bool,
    buffer: Buffer = Buffer.OUTPUT,
) -> None:
    """Every part travels once round the ring: summed on its way (a reduce-scatter), or copied (an all-gather)."""
    parts = len(ranks)
    right, left = ranks[(me + 1) % parts], ranks[(me - 1) % parts]
    receive = build.recv_reduce if reduces else build.recv
    for step in range(parts - 1):
        sent = (me - step - reduces) % parts
        received = (sent - 1) % parts
        build.send(right, low + at[sent], at[sent + 1] - at[sent], buffer)
        receive(left, low + at[received], at[received + 1] - at[received], buffer)
        build.next_stage()


def _halving_doubling(build: ScheduleBuilder, ranks: Sequence[int], me: int, low: int, count: int) -> None:
    """All-reduce: halves the range at each step while reducing, then doubles it again while gathering.

    If P is not a power of two, each rank beyond the largest one below P sends its data to a partner first and receives
    the result last.
    """
    core = 1 << (len(ranks).bit_length() - 1)
    extra = len(ranks) - core
    if me >= core:
        build.send(ranks[me - core], low, count)
        build.next_stage()
        build.recv(ranks[me - core], low, count)
        build.next_stage()
        return
    if me < extra:
        build.recv_reduce(ranks[me + core], low, count)
    if extra:
        build.next_stage()
    at = split_points(count, core)
    begin, end = 0, core  # indices into `at`
    exchanges = []
    distance = core // 2
    while distance:
        middle = (begin + end) // 2
        peer = ranks[me ^ distance]
        keep, give = ((begin, middle), (middle, end)) if not me & distance else ((middle, end), (begin, middle))
        build.send(peer, low + at[give[0]], at[give[1]] - at[give[0]])
        build.recv_reduce(peer, low + at[keep[0]], at[keep[1]] - at[keep[0]])
        build.next_stage()
        exchanges.append((peer, keep, give))
        begin, end = keep
        distance //= 2
    for peer, keep, give in reversed(exchanges):
        build.send(peer, low + at[keep[0]], at[keep[1]] - at[keep[0]])
        build.recv(peer, low + at[give[0]], at[give[1]] - at[give[0]])
        build.next_stage()
    if extra:
        if me < extra:
            build.send(ranks[me + core], low, count)
        build.next_stage()


def _all_reduce_encoded(
    build: ScheduleBuilder, ranks: Sequence[int], me: int, low: int, count: int, codec: str
) -> None:
    """All-reduce with encoded messages. Every rank decodes the same bytes in the same order.

    Two or three ranks exchange their whole encoded range: as many bytes as two half-exchanges, and one loss instead of
    two. More ranks scatter, reduce and gather, and encode twice. Error feedback compensates the first loss only; the
    second one is of the sum.
    """
    parts = len(ranks)
    if parts <= 3:
        size = codec_bytes(codec, count)
        build.wire_bytes = max(build.wire_bytes, parts * size)
        build.local(StepKind.ENCODE, Buffer.OUTPUT, low, Buffer.WIRE, me * size, count)
        build.next_stage()
        for index, peer in enumerate(ranks):
            if index != me:
                build.send(peer, me * size, size, Buffer.WIRE)
                build.recv(peer, index * size, size, Buffer.WIRE)
        build.next_stage()
        for index in range(parts):
            kind = StepKind.DECODE_REDUCE if index else StepKind.DECODE
            build.local(kind, Buffer.WIRE, index * size, Buffer.OUTPUT, low, count)
        build.next_stage()
        return
    at = split_points(count, parts)
    widths = [end - begin for begin, end in pairwise(at)]
    sizes = [codec_bytes(codec, width) for width in widths]
    starts = [sum(sizes[:index]) for index in range(parts + 1)]
    inbox = starts[-1]  # behind the outgoing parts, one slot per rank for what this rank receives
    build.wire_bytes = max(build.wire_bytes, inbox + parts * sizes[me])
    for index in range(parts):
        build.local(StepKind.ENCODE, Buffer.OUTPUT, low + at[index], Buffer.WIRE, starts[index], widths[index])
    build.next_stage()
    for index, peer in enumerate(ranks):
        if index != me:
            build.send(peer, starts[index], sizes[index], Buffer.WIRE)
            build.recv(peer, inbox + index * sizes[me], sizes[me], Buffer.WIRE)
    build.next_stage()
    for index in range(parts):
        kind = StepKind.DECODE_REDUCE if index else StepKind.DECODE
        source = starts[me] if index == me else inbox + index * sizes[me]
        build.local(kind, Buffer.WIRE, source, Buffer.OUTPUT, low + at[me], widths[me])
    build.next_stage()
    build.local(StepKind.ENCODE, Buffer.OUTPUT, low + at[me], Buffer.WIRE, starts[me], widths[me], fan=1)
    build.next_stage()
    for index, peer in enumerate(ranks):
        if index != me:
            build.send(peer, starts[me], sizes[me], Buffer.WIRE)
            build.recv(peer, starts[index], sizes[index], Buffer.WIRE)
    build.next_stage()
    for index in range(parts):
        build.local(StepKind.DECODE, Buffer.WIRE, starts[index], Buffer.OUTPUT, low + at[index], widths[index])
    build.next_stage()


def _all_reduce_pipelined(
    build: ScheduleBuilder, ranks: Sequence[int], me: int, low: int, count: int, rates: Sequence[float]
) -> None:
    """Flat all-reduce with unequal parts, chunk by chunk: one chunk is gathered while the next one is scattered.

    A slow rank that owns little mostly sends in the scatter and mostly receives in the gather. Running both at once
    fills its link in both directions; unequal parts are of no use otherwise.
    """
    parts = len(ranks)
    chunks = [
        (low + begin, split_points(end - begin, parts, rates))
        for begin, end in pairwise(split_points(count, PIPELINE_CHUNKS))
        if begin < end
    ]
    for number in range(len(chunks) + 1):
        for index, peer in enumerate(ranks):
            if index == me:
                continue
            if number < len(chunks):
                base, at = chunks[number]
                width = at[me + 1] - at[me]
                build.send(peer, base + at[index], at[index + 1] - at[index])
                build.recv(peer, index * width, width, Buffer.SCRATCH)
            if number:
                base, at = chunks[number - 1]
                build.send(peer, base + at[me], at[me + 1] - at[me])
                build.recv(peer, base + at[index], at[index + 1] - at[index])
        build.next_stage()
        if number < len(chunks):
            _fold_own_part(build, parts, me, *chunks[number])


def all_reduce_range(
    build: ScheduleBuilder,
    algorithm: str,
    ranks: Sequence[int],
    me: int,
    low: int,
    count: int,
    codec: str = "none",
    rates: Sequence[float] | None = None,
) -> None:
    """`rates` are those of all ranks of the group, not only of `ranks`."""
    if len(ranks) == 1 or count == 0:
        return
    if codec != "none":
        _all_reduce_encoded(build, ranks, me, low, count, codec)
    elif algorithm == "halving_doubling":
        _halving_doubling(build, ranks, me, low, count)
    elif algorithm == "ring":
        at = split_points(count, len(ranks))
        ring_pass(build, ranks, me, low, at, reduces=True)
        ring_pass(build, ranks, me, low, at, reduces=False)
    elif rates is not None and len(ranks) > 2:
        _all_reduce_pipelined(build, ranks, me, low, count, [rates[peer] for peer in ranks])
    else:
        at = split_points(count, len(ranks))
        reduce_scatter_flat(build, ranks, me, low, at)
        all_gather_flat(build, ranks, me, low, at)
