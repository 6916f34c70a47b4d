"""Collective algorithms as data: each is a function that returns the steps of one rank.

A step sends, receives, reduces or copies a range of a buffer. Steps of one *stage* run together, stages one after
another. The native core of c3 runs them, the verifier (`lakh.c3.verify`) proves them for any number of
ranks, the planner prices them. Offsets and counts are in elements; in the wire buffer, which holds encoded data, in
bytes.

Cost per rank, P ranks and S bytes (`bytes_sent`, `num_stages` of the result say the same, and tests hold them to it):

    all_reduce       flat                2 stages              2(P-1)/P * S    every rank talks to every rank
                     halving_doubling    2 log2(P) stages      2(P-1)/P * S    P a power of two; else 2 more stages,
                     S more ring                2(P-1) stages         2(P-1)/P * S    talks to two neighbours only
                     hierarchical        2 stages a tier       outer tiers carry only 1/(ranks inside) of S
    all_gather, reduce_scatter           half of the above
    broadcast        tree                log2(P) stages        S for each child

Float addition is commutative but not associative: each schedule adds in an order that is the same on all ranks, so that
all ranks end with the same bits.
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
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "codec_bytes",
    "gather",
    "is_regular",
    "reduce",
    "reduce_scatter",
    "scatter",
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


def codec_bytes(codec: str, count: int) -> int:
    """Bytes on the wire, scales included, of `count` float32 elements."""
    groups = -(-count // GROUP)
    sizes = {"none": 4 * count, "bf16": 2 * count, "int8": 34 * groups, "int4": 18 * groups}
    if codec not in sizes:
        raise UserError(f"codec {codec!r}", "no such codec", f"choose from: {', '.join(sizes)}")
    return sizes[codec]


class _Steps:
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


# --- pieces: a team of ranks works on a range of OUTPUT, in place --------------------------------------------------
#
# `team` lists ranks in the order that everybody uses, `me` is this rank's place in it, [low, low + count) the range.


def _reduce_scatter_flat(make: _Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    """Afterwards share `me` of the range is reduced, in the order of the team and in one rounding."""
    parts = len(team)
    mine, end = share(count, me, parts), share(count, me + 1, parts)
    width = end - mine
    for place, peer in enumerate(team):
        if place == me:
            continue
        begin = share(count, place, parts)
        make.send(peer, low + begin, share(count, place + 1, parts) - begin)
        make.recv(peer, place * width, width, Buffer.SCRATCH)
    make.next_stage()
    make.scratch(parts * width)
    make.local(Kind.COPY, Buffer.OUTPUT, low + mine, Buffer.SCRATCH, me * width, width)
    make.local(Kind.FOLD, Buffer.SCRATCH, 0, Buffer.OUTPUT, low + mine, width, fan=parts)
    make.next_stage()


def _all_gather_flat(make: _Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    parts = len(team)
    mine, end = share(count, me, parts), share(count, me + 1, parts)
    for place, peer in enumerate(team):
        if place != me:
            begin = share(count, place, parts)
            make.send(peer, low + mine, end - mine)
            make.recv(peer, low + begin, share(count, place + 1, parts) - begin)
    make.next_stage()


def _reduce_scatter_ring(make: _Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    parts = len(team)
    right, left = team[(me + 1) % parts], team[(me - 1) % parts]
    for step in range(parts - 1):
        out, into = (me - step - 1) % parts, (me - step - 2) % parts
        make.send(right, low + share(count, out, parts), share(count, out + 1, parts) - share(count, out, parts))
        make.recv_reduce(
            left, low + share(count, into, parts), share(count, into + 1, parts) - share(count, into, parts)
        )
        make.next_stage()


def _all_gather_ring(make: _Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    parts = len(team)
    right, left = team[(me + 1) % parts], team[(me - 1) % parts]
    for step in range(parts - 1):
        out, into = (me - step) % parts, (me - step - 1) % parts
        make.send(right, low + share(count, out, parts), share(count, out + 1, parts) - share(count, out, parts))
        make.recv(left, low + share(count, into, parts), share(count, into + 1, parts) - share(count, into, parts))
        make.next_stage()


def _halving_doubling(make: _Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    """All-reduce: halve the range at each step while reducing, then double it again while gathering.

    With P not a power of two, the ranks beyond it hand their data to a partner first and get the result last.
    """
    parts = len(team)
    inner = 1 << (parts.bit_length() - 1)
    extra = parts - inner
    if me >= inner:
        make.send(team[me - inner], low, count)
        make.next_stage()
        make.recv(team[me - inner], low, count)
        make.next_stage()
        return
    if me < extra:
        make.recv_reduce(team[me + inner], low, count)
    if extra:
        make.next_stage()
    begin, end = 0, inner  # in shares of the range
    path = []
    distance = inner // 2
    while distance:
        middle = (begin + end) // 2
        peer = team[me ^ distance]
        keep, give = ((begin, middle), (middle, end)) if not me & distance else ((middle, end), (begin, middle))
        make.send(peer, low + share(count, give[0], inner), share(count, give[1], inner) - share(count, give[0], inner))
        kept = share(count, keep[1], inner) - share(count, keep[0], inner)
        make.recv_reduce(peer, low + share(count, keep[0], inner), kept)
        make.next_stage()
        path.append((peer, keep, give))
        begin, end = keep
        distance //= 2
    for peer, keep, give in reversed(path):
        make.send(peer, low + share(count, keep[0], inner), share(count, keep[1], inner) - share(count, keep[0], inner))
        given = share(count, give[1], inner) - share(count, give[0], inner)
        make.recv(peer, low + share(count, give[0], inner), given)
        make.next_stage()
    if extra:
        if me < extra:
            make.send(team[me + inner], low, count)
        make.next_stage()


def _all_reduce_encoded(make: _Steps, team: Sequence[int], me: int, low: int, count: int, codec: str) -> None:
    """All-reduce with codec on the wire. Every rank decodes the same bytes in the same order.

    Two or three ranks exchange their whole encoded range (as many bytes as two half-exchanges, and one loss instead of
    two); more ranks scatter, reduce and gather, encoding twice. The first loss can be fed back (the residual), the
    second cannot: it is of the sum.
    """
    parts = len(team)
    if parts <= 3:
        size = codec_bytes(codec, count)
        make.wire_bytes = max(make.wire_bytes, parts * size)
        make.local(Kind.ENCODE, Buffer.OUTPUT, low, Buffer.WIRE, me * size, count)
        make.next_stage()
        for place, peer in enumerate(team):
            if place != me:
                make.send(peer, me * size, size, Buffer.WIRE)
                make.recv(peer, place * size, size, Buffer.WIRE)
        make.next_stage()
        for place in range(parts):
            kind = Kind.DECODE_REDUCE if place else Kind.DECODE
            make.local(kind, Buffer.WIRE, place * size, Buffer.OUTPUT, low, count)
        make.next_stage()
        return
    bounds = [share(count, place, parts) for place in range(parts + 1)]
    widths = [bounds[place + 1] - bounds[place] for place in range(parts)]
    sizes = [codec_bytes(codec, width) for width in widths]
    starts = [sum(sizes[:place]) for place in range(parts + 1)]
    inbox = starts[-1]  # after the outgoing shares, one slot per rank for what comes for us
    make.wire_bytes = max(make.wire_bytes, inbox + parts * sizes[me], inbox)
    for place in range(parts):
        make.local(Kind.ENCODE, Buffer.OUTPUT, low + bounds[place], Buffer.WIRE, starts[place], widths[place])
    make.next_stage()
    for place, peer in enumerate(team):
        if place != me:
            make.send(peer, starts[place], sizes[place], Buffer.WIRE)
            make.recv(peer, inbox + place * sizes[me], sizes[me], Buffer.WIRE)
    make.next_stage()
    for place in range(parts):
        kind = Kind.DECODE_REDUCE if place else Kind.DECODE
        at = starts[me] if place == me else inbox + place * sizes[me]
        make.local(kind, Buffer.WIRE, at, Buffer.OUTPUT, low + bounds[me], widths[me])
    make.next_stage()
    make.local(Kind.ENCODE, Buffer.OUTPUT, low + bounds[me], Buffer.WIRE, starts[me], widths[me], fan=1)
    make.next_stage()
    for place, peer in enumerate(team):
        if place != me:
            make.send(peer, starts[me], sizes[me], Buffer.WIRE)
            make.recv(peer, starts[place], sizes[place], Buffer.WIRE)
    make.next_stage()
    for place in range(parts):
        make.local(Kind.DECODE, Buffer.WIRE, starts[place], Buffer.OUTPUT, low + bounds[place], widths[place])
    make.next_stage()


def _all_reduce_piece(
    make: _Steps, algorithm: str, team: Sequence[int], me: int, low: int, count: int, codec: str = "none"
) -> None:
    if len(team) == 1 or count == 0:
        return
    if codec != "none":
        _all_reduce_encoded(make, team, me, low, count, codec)
    elif algorithm == "halving_doubling":
        _halving_doubling(make, team, me, low, count)
    elif algorithm == "ring":
        _reduce_scatter_ring(make, team, me, low, count)
        _all_gather_ring(make, team, me, low, count)
    else:
        _reduce_scatter_flat(make, team, me, low, count)
        _all_gather_flat(make, team, me, low, count)


# --- whole operations ----------------------------------------------------------------------------------------------


def all_reduce(
    algorithm: str,
    rank: int,
    size: int,
    count: int,
    *,
    places: Sequence[Sequence[str]] | None = None,
    order: Sequence[int] | None = None,
    codec: str = "none",
) -> Schedule:
    """The sum of everybody's OUTPUT, in everybody's OUTPUT.

    `places[r]` are the names of the groups that hold rank r, from the innermost (its host) outwards; hierarchical needs
    them. `order` is the order of ranks in flat, ring and halving_doubling. `codec` is used between the outermost
    groups.
    """
    _check(algorithm, rank, size, count)
    make = _Steps()
    if algorithm == "hierarchical":
        if places is None:
            raise UserError("hierarchical all_reduce", "has no places", "say which host, rack, ... holds each rank")
        if is_regular(places):
            _hierarchical(make, rank, places, 0, list(range(size)), 0, count, codec)
        else:
            _by_leaders(make, rank, places, count, codec)
        return make.done("hierarchical", codec)
    team = list(order) if order is not None else list(range(size))
    if sorted(team) != list(range(size)):
        raise UserError("order", f"{team} does not name each of {size} ranks once", "give a permutation")
    _all_reduce_piece(make, algorithm, team, team.index(rank), 0, count, codec)
    return make.done(algorithm, codec)


def is_regular(places: Sequence[Sequence[str]]) -> bool:
    """Whether all groups of a tier hold equally many ranks, so that shares line up between them."""
    tiers = len(places[0])
    if any(len(place) != tiers for place in places):
        return False
    for tier in range(tiers):
        sizes: dict[tuple[str, ...], int] = {}
        for place in places:
            group = tuple(place[tier:])
            sizes[group] = sizes.get(group, 0) + 1
        if len(set(sizes.values())) > 1:
            return False
    return True


def _hierarchical(
    make: _Steps,
    rank: int,
    places: Sequence[Sequence[str]],
    tier: int,
    among: list[int],
    low: int,
    count: int,
    codec: str,
) -> None:
    """Reduce-scatter inside the group of this tier, all-reduce the share outside it, all-gather inside.

    `among` are the ranks that hold the same share: one of each group of the tiers already passed.
    """
    tiers = len(places[0])
    if tier == tiers:
        _all_reduce_piece(make, "flat", among, among.index(rank), low, count, codec)
        return
    mine = tuple(places[rank][tier:])
    team = [peer for peer in among if tuple(places[peer][tier:]) == mine]
    me = team.index(rank)
    begin, end = share(count, me, len(team)), share(count, me + 1, len(team))
    # The ranks that hold share `me` of their own groups; regularity makes `among` split the same way everywhere.
    groups: dict[tuple[str, ...], list[int]] = {}
    for peer in among:
        groups.setdefault(tuple(places[peer][tier:]), []).append(peer)
    same_share = sorted(members[me] for members in groups.values())
    on_host = tier == 0 and len(team) > 1
    if on_host:
        make.local(Kind.HOST_REDUCE_SCATTER, Buffer.OUTPUT, low, Buffer.OUTPUT, low, count)
        make.next_stage()
    elif len(team) > 1:
        _reduce_scatter_flat(make, team, me, low, count)
    _hierarchical(make, rank, places, tier + 1, same_share, low + begin, end - begin, codec)
    if on_host:
        make.local(Kind.HOST_ALL_GATHER, Buffer.OUTPUT, low, Buffer.OUTPUT, low, count)
        make.next_stage()
    elif len(team) > 1:
        _all_gather_flat(make, team, me, low, count)


def _by_leaders(make: _Steps, rank: int, places: Sequence[Sequence[str]], count: int, codec: str) -> None:
    """Groups of unequal size: the first rank of each sums it up, the firsts all-reduce, and hand the result back."""
    hosts: dict[tuple[str, ...], list[int]] = {}
    for peer, place in enumerate(places):
        hosts.setdefault(tuple(place), []).append(peer)
    team = hosts[tuple(places[rank])]
    leaders = [members[0] for members in hosts.values()]
    if len(team) > 1:
        make.local(Kind.HOST_REDUCE_SCATTER, Buffer.OUTPUT, 0, Buffer.OUTPUT, 0, count)
        make.next_stage()
        make.local(Kind.HOST_ALL_GATHER, Buffer.OUTPUT, 0, Buffer.OUTPUT, 0, count)
        make.next_stage()
    if rank == team[0]:
        _all_reduce_piece(make, "flat", leaders, leaders.index(rank), 0, count, codec)
    if len(team) > 1:
        make.local(Kind.HOST_BROADCAST, Buffer.OUTPUT, 0, Buffer.OUTPUT, 0, count, fan=0)
        make.next_stage()


def all_gather(algorithm: str, rank: int, size: int, count: int) -> Schedule:
    """INPUT (count) of every rank, one after another in OUTPUT (size * count)."""
    _check(algorithm, rank, size, count)
    make = _Steps()
    make.local(Kind.COPY, Buffer.INPUT, 0, Buffer.OUTPUT, rank * count, count)
    make.next_stage()
    team = list(range(size))
    if size > 1:
        (_all_gather_ring if algorithm == "ring" else _all_gather_flat)(make, team, rank, 0, size * count)
    return make.done(algorithm)


def reduce_scatter(algorithm: str, rank: int, size: int, count: int) -> Schedule:
    """Part `rank` (count) of the sum of everybody's INPUT (size * count), in OUTPUT (count)."""
    _check(algorithm, rank, size, count)
    make = _Steps()
    if algorithm == "ring" and size > 1:
        # In place in scratch: the caller's input is not ours to change.
        make.scratch(size * count)
        make.local(Kind.COPY, Buffer.INPUT, 0, Buffer.SCRATCH, 0, size * count)
        make.next_stage()
        right, left = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            out, into = (rank - step - 1) % size, (rank - step - 2) % size
            make.send(right, out * count, count, Buffer.SCRATCH)
            make.recv_reduce(left, into * count, count, Buffer.SCRATCH)
            make.next_stage()
        make.local(Kind.COPY, Buffer.SCRATCH, rank * count, Buffer.OUTPUT, 0, count)
        return make.done("ring")
    make.scratch(size * count)
    for peer in range(size):
        if peer != rank:
            make.send(peer, peer * count, count, Buffer.INPUT)
            make.recv(peer, peer * count, count, Buffer.SCRATCH)
    make.next_stage()
    make.local(Kind.COPY, Buffer.INPUT, rank * count, Buffer.SCRATCH, rank * count, count)
    make.local(Kind.FOLD, Buffer.SCRATCH, 0, Buffer.OUTPUT, 0, count, fan=size)
    return make.done("flat")


def broadcast(rank: int, size: int, count: int, root: int) -> Schedule:
    """OUTPUT of the root in everybody's OUTPUT, along a binomial tree."""
    _check("flat", rank, size, count, root)
    make = _Steps()
    place = (rank - root) % size
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            make.send((place + distance + root) % size, 0, count)
        elif distance <= place < 2 * distance:
            make.recv((place - distance + root) % size, 0, count)
        make.next_stage()
        distance *= 2
    return make.done("tree")


def reduce(rank: int, size: int, count: int, root: int) -> Schedule:
    """The sum of everybody's INPUT in the root's OUTPUT; a tree towards the root. Inputs stay as they are."""
    _check("flat", rank, size, count, root)
    make = _Steps()
    make.scratch(count)
    make.local(Kind.COPY, Buffer.INPUT, 0, Buffer.SCRATCH, 0, count)
    make.next_stage()
    place = (rank - root) % size
    distance = 1
    while distance < size:
        if place % (2 * distance) == distance:
            make.send((place - distance + root) % size, 0, count, Buffer.SCRATCH)
            make.next_stage()
            break
        if place + distance < size:
            make.recv_reduce((place + distance + root) % size, 0, count, Buffer.SCRATCH)
        make.next_stage()
        distance *= 2
    if rank == root:
        make.local(Kind.COPY, Buffer.SCRATCH, 0, Buffer.OUTPUT, 0, count)
    return make.done("tree")


def gather(rank: int, size: int, count: int, root: int) -> Schedule:
    _check("flat", rank, size, count, root)
    make = _Steps()
    if rank == root:
        make.local(Kind.COPY, Buffer.INPUT, 0, Buffer.OUTPUT, rank * count, count)
        make.next_stage()
        for peer in range(size):
            if peer != rank:
                make.recv(peer, peer * count, count)
    else:
        make.send(root, 0, count, Buffer.INPUT)
    return make.done("flat")


def scatter(rank: int, size: int, count: int, root: int) -> Schedule:
    _check("flat", rank, size, count, root)
    make = _Steps()
    if rank == root:
        make.local(Kind.COPY, Buffer.INPUT, rank * count, Buffer.OUTPUT, 0, count)
        make.next_stage()
        for peer in range(size):
            if peer != rank:
                make.send(peer, peer * count, count, Buffer.INPUT)
    else:
        make.recv(root, 0, count)
    return make.done("flat")


def all_to_all(rank: int, size: int, sends: Sequence[int], receives: Sequence[int]) -> Schedule:
    """`sends[r]` elements of INPUT to rank r, `receives[r]` from it, each in rank order."""
    if len(sends) != size or len(receives) != size:
        raise UserError("all_to_all", f"{len(sends)} and {len(receives)} splits for {size} ranks", "give one per rank")
    make = _Steps()
    out, into = [0], [0]
    for peer in range(size):
        out.append(out[-1] + sends[peer])
        into.append(into[-1] + receives[peer])
    make.local(Kind.COPY, Buffer.INPUT, out[rank], Buffer.OUTPUT, into[rank], sends[rank])
    make.next_stage()
    for distance in range(1, size):  # everybody starts with another peer
        to, source = (rank + distance) % size, (rank - distance) % size
        make.send(to, out[to], sends[to], Buffer.INPUT)
        make.recv(source, into[source], receives[source])
    return make.done("flat")


def barrier(rank: int, size: int) -> Schedule:
    """Dissemination: after log2(P) stages everybody has heard of everybody."""
    _check("flat", rank, size, 0)
    make = _Steps()
    make.scratch(2)
    distance = 1
    while distance < size:
        make.send((rank + distance) % size, 0, 1, Buffer.SCRATCH)
        make.recv((rank - distance) % size, 1, 1, Buffer.SCRATCH)
        make.next_stage()
        distance *= 2
    return make.done("dissemination")


def _check(algorithm: str, rank: int, size: int, count: int, root: int = 0) -> None:
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm {algorithm!r}", "no such algorithm", f"choose from: {', '.join(ALGORITHMS)}")
    if not 0 <= rank < size or not 0 <= root < size or count < 0:
        raise UserError("schedule", f"rank {rank} of {size}, root {root}, {count} elements", "mend the numbers")
