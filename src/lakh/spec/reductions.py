"""Collectives that reduce and that everybody takes part in alike, as schedules: all_reduce, reduce_scatter, all_gather.

Pieces work on a range of the output among a team of ranks; whole operations put them together, in one tier or over
the tiers of a topology (host, rack, zone). Float addition is commutative but not associative: each schedule adds in an
order that is the same on all ranks, so that all ranks end with the same bits. Costs: see collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lakh.errors import UserError
from lakh.spec.schedule import Buffer, Kind, Schedule, Steps, check, codec_bytes, cuts, share

__all__ = ["PIECES", "all_gather", "all_reduce", "is_regular", "reduce_scatter"]

PIECES = 16
"""Of an all_reduce with unequal parts: the first scatter and the last gather, which overlap nothing, are so small."""

# --- pieces: a team of ranks works on a range of OUTPUT, in place --------------------------------------------------
#
# `team` lists ranks in the order that everybody uses, `me` is this rank's place in it, [low, low + count) the range.


def _reduce_scatter_flat(make: Steps, team: Sequence[int], me: int, low: int, at: Sequence[int]) -> None:
    """Afterwards part `me` of the range, cut at `at`, is reduced, in the order of the team and in one rounding."""
    parts, width = len(team), at[me + 1] - at[me]
    for place, peer in enumerate(team):
        if place == me:
            continue
        make.send(peer, low + at[place], at[place + 1] - at[place])
        make.recv(peer, place * width, width, Buffer.SCRATCH)
    make.next_stage()
    make.scratch(parts * width)
    make.local(Kind.COPY, Buffer.OUTPUT, low + at[me], Buffer.SCRATCH, me * width, width)
    make.local(Kind.FOLD, Buffer.SCRATCH, 0, Buffer.OUTPUT, low + at[me], width, fan=parts)
    make.next_stage()


def _all_gather_flat(make: Steps, team: Sequence[int], me: int, low: int, at: Sequence[int]) -> None:
    for place, peer in enumerate(team):
        if place != me:
            make.send(peer, low + at[me], at[me + 1] - at[me])
            make.recv(peer, low + at[place], at[place + 1] - at[place])
    make.next_stage()


def _reduce_scatter_ring(make: Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    parts = len(team)
    right, left = team[(me + 1) % parts], team[(me - 1) % parts]
    for step in range(parts - 1):
        out, into = (me - step - 1) % parts, (me - step - 2) % parts
        make.send(right, low + share(count, out, parts), share(count, out + 1, parts) - share(count, out, parts))
        make.recv_reduce(
            left, low + share(count, into, parts), share(count, into + 1, parts) - share(count, into, parts)
        )
        make.next_stage()


def _all_gather_ring(make: Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
    parts = len(team)
    right, left = team[(me + 1) % parts], team[(me - 1) % parts]
    for step in range(parts - 1):
        out, into = (me - step) % parts, (me - step - 1) % parts
        make.send(right, low + share(count, out, parts), share(count, out + 1, parts) - share(count, out, parts))
        make.recv(left, low + share(count, into, parts), share(count, into + 1, parts) - share(count, into, parts))
        make.next_stage()


def _halving_doubling(make: Steps, team: Sequence[int], me: int, low: int, count: int) -> None:
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


def _all_reduce_encoded(make: Steps, team: Sequence[int], me: int, low: int, count: int, codec: str) -> None:
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
    bounds = cuts(count, parts)
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
    make: Steps,
    algorithm: str,
    team: Sequence[int],
    me: int,
    low: int,
    count: int,
    codec: str = "none",
    rates: Sequence[float] | None = None,
) -> None:
    """`rates[rank]`, of all ranks: who is slower owns a smaller part, where parts need not be equal."""
    if len(team) == 1 or count == 0:
        return
    mine = [rates[peer] for peer in team] if rates is not None else None
    if codec != "none":
        _all_reduce_encoded(make, team, me, low, count, codec)
    elif algorithm == "halving_doubling":
        _halving_doubling(make, team, me, low, count)
    elif algorithm == "ring":
        _reduce_scatter_ring(make, team, me, low, count)
        _all_gather_ring(make, team, me, low, count)
    elif mine is not None and len(team) > 2:
        _all_reduce_in_pieces(make, team, me, low, count, mine)
    else:
        at = cuts(count, len(team))
        _reduce_scatter_flat(make, team, me, low, at)
        _all_gather_flat(make, team, me, low, at)


def _all_reduce_in_pieces(
    make: Steps, team: Sequence[int], me: int, low: int, count: int, rates: Sequence[float]
) -> None:
    """Flat, with unequal parts, piece after piece: while one piece is gathered the next one is scattered.

    A slow rank that owns little sends most of the time in the first half and receives in the second; only both at once
    fill its link in both directions, which is what unequal parts are worth.
    """
    parts = len(team)
    cut = cuts(count, PIECES)
    ranges = [(low + begin, cuts(end - begin, parts, rates)) for begin, end in pairwise(cut) if begin < end]
    widest = max(at[me + 1] - at[me] for _, at in ranges)
    make.scratch(parts * widest)
    for turn in range(len(ranges) + 1):
        for place, peer in enumerate(team):
            if place == me:
                continue
            if turn < len(ranges):
                base, at = ranges[turn]
                width = at[me + 1] - at[me]
                make.send(peer, base + at[place], at[place + 1] - at[place])
                make.recv(peer, place * width, width, Buffer.SCRATCH)
            if turn:
                base, at = ranges[turn - 1]
                make.send(peer, base + at[me], at[me + 1] - at[me])
                make.recv(peer, base + at[place], at[place + 1] - at[place])
        make.next_stage()
        if turn < len(ranges):
            base, at = ranges[turn]
            width = at[me + 1] - at[me]
            make.local(Kind.COPY, Buffer.OUTPUT, base + at[me], Buffer.SCRATCH, me * width, width)
            make.local(Kind.FOLD, Buffer.SCRATCH, 0, Buffer.OUTPUT, base + at[me], width, fan=parts)
            make.next_stage()


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
    rates: Sequence[float] | None = None,
) -> Schedule:
    """The sum of everybody's OUTPUT, in everybody's OUTPUT.

    `places[r]` are the names of the groups that hold rank r, from the innermost (its host) outwards; hierarchical needs
    them. `order` is the order of ranks in flat, ring and halving_doubling. `codec` is used between the outermost
    groups. `rates[r]`, in any unit, is how fast rank r's links are: in flat, and between the outermost groups of
    hierarchical, slower ranks own smaller parts (`schedule.cuts`); not with a codec.
    """
    check(algorithm, rank, size, count)
    make = Steps()
    if algorithm == "hierarchical":
        if places is None:
            raise UserError("hierarchical all_reduce", "has no places", "say which host, rack, ... holds each rank")
        if is_regular(places):
            _hierarchical(make, rank, places, 0, list(range(size)), 0, count, codec, rates)
        else:
            _by_leaders(make, rank, places, count, codec, rates)
        return make.done("hierarchical", codec)
    team = list(order) if order is not None else list(range(size))
    if sorted(team) != list(range(size)):
        raise UserError("order", f"{team} does not name each of {size} ranks once", "give a permutation")
    _all_reduce_piece(make, algorithm, team, team.index(rank), 0, count, codec, rates)
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
    make: Steps,
    rank: int,
    places: Sequence[Sequence[str]],
    tier: int,
    among: list[int],
    low: int,
    count: int,
    codec: str,
    rates: Sequence[float] | None,
) -> None:
    """Reduce-scatter inside the group of this tier, all-reduce the share outside it, all-gather inside.

    `among` are the ranks that hold the same share: one of each group of the tiers already passed.
    """
    tiers = len(places[0])
    if tier == tiers:
        _all_reduce_piece(make, "flat", among, among.index(rank), low, count, codec, rates)
        return
    mine = tuple(places[rank][tier:])
    team = [peer for peer in among if tuple(places[peer][tier:]) == mine]
    me = team.index(rank)
    at = cuts(count, len(team))  # equal, so that the same share is owned in every group
    begin, end = at[me], at[me + 1]
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
        _reduce_scatter_flat(make, team, me, low, at)
    _hierarchical(make, rank, places, tier + 1, same_share, low + begin, end - begin, codec, rates)
    if on_host:
        make.local(Kind.HOST_ALL_GATHER, Buffer.OUTPUT, low, Buffer.OUTPUT, low, count)
        make.next_stage()
    elif len(team) > 1:
        _all_gather_flat(make, team, me, low, at)


def _by_leaders(
    make: Steps, rank: int, places: Sequence[Sequence[str]], count: int, codec: str, rates: Sequence[float] | None
) -> None:
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
        _all_reduce_piece(make, "flat", leaders, leaders.index(rank), 0, count, codec, rates)
    if len(team) > 1:
        make.local(Kind.HOST_BROADCAST, Buffer.OUTPUT, 0, Buffer.OUTPUT, 0, count, fan=0)
        make.next_stage()


def all_gather(
    algorithm: str, rank: int, size: int, count: int, *, places: Sequence[Sequence[str]] | None = None
) -> Schedule:
    """INPUT (count) of every rank, one after another in OUTPUT (size * count)."""
    check(algorithm, rank, size, count)
    if algorithm == "hierarchical":
        return _all_gather_by_host(rank, _equal_hosts(places), count)
    make = Steps()
    make.local(Kind.COPY, Buffer.INPUT, 0, Buffer.OUTPUT, rank * count, count)
    make.next_stage()
    team = list(range(size))
    if size > 1 and algorithm == "ring":
        _all_gather_ring(make, team, rank, 0, size * count)
    elif size > 1:
        _all_gather_flat(make, team, rank, 0, cuts(size * count, size))
    return make.done(algorithm)


def reduce_scatter(
    algorithm: str, rank: int, size: int, count: int, *, places: Sequence[Sequence[str]] | None = None
) -> Schedule:
    """Part `rank` (count) of the sum of everybody's INPUT (size * count), in OUTPUT (count)."""
    check(algorithm, rank, size, count)
    if algorithm == "hierarchical":
        return _reduce_scatter_by_host(rank, _equal_hosts(places), count)
    make = Steps()
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


def _equal_hosts(places: Sequence[Sequence[str]] | None) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    if places is None or not is_regular(places):
        raise UserError("hierarchical schedule", "needs hosts with equally many ranks", "choose flat or ring")
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(tuple(place), []).append(rank)
    return list(hosts.values())


def _all_gather_by_host(rank: int, hosts: list[list[int]], count: int) -> Schedule:
    """Each part crosses once into every host, to the rank with the same place there, which shares it inside."""
    make = Steps()
    mine = next(number for number, team in enumerate(hosts) if rank in team)
    place, inside = hosts[mine].index(rank), len(hosts[0])
    size = inside * len(hosts)
    in_order = [peer for team in hosts for peer in team]
    target = Buffer.OUTPUT if in_order == list(range(size)) else Buffer.SCRATCH
    if target == Buffer.SCRATCH:
        make.scratch(size * count)
    make.local(Kind.COPY, Buffer.INPUT, 0, target, (mine * inside + place) * count, count)
    make.next_stage()
    for number, team in enumerate(hosts):
        if number != mine:
            make.send(team[place], 0, count, Buffer.INPUT)
            make.recv(team[place], (number * inside + place) * count, count, target)
    make.next_stage()
    for number in range(len(hosts) if inside > 1 else 0):
        low = number * inside * count
        make.local(Kind.HOST_ALL_GATHER, target, low, target, low, inside * count)
        make.next_stage()
    if target == Buffer.SCRATCH:
        for at, peer in enumerate(in_order):
            make.local(Kind.COPY, target, at * count, Buffer.OUTPUT, peer * count, count)
    return make.done("hierarchical")


def _reduce_scatter_by_host(rank: int, hosts: list[list[int]], count: int) -> Schedule:
    """Each host adds up its own ranks first; the sum for a rank elsewhere leaves from the rank with its place."""
    make = Steps()
    mine = next(number for number, team in enumerate(hosts) if rank in team)
    place, inside = hosts[mine].index(rank), len(hosts[0])
    size = inside * len(hosts)
    sums = size * count  # behind the input, one sum of each host for us
    make.scratch(sums + len(hosts) * count)
    for at, peer in enumerate(peer for team in hosts for peer in team):
        make.local(Kind.COPY, Buffer.INPUT, peer * count, Buffer.SCRATCH, at * count, count)
    make.next_stage()
    for number in range(len(hosts) if inside > 1 else 0):
        low = number * inside * count
        make.local(Kind.HOST_REDUCE_SCATTER, Buffer.SCRATCH, low, Buffer.SCRATCH, low, inside * count)
        make.next_stage()
    for number, team in enumerate(hosts):
        if number != mine:
            make.send(team[place], (number * inside + place) * count, count, Buffer.SCRATCH)
            make.recv(team[place], sums + number * count, count, Buffer.SCRATCH)
    make.next_stage()
    own = (mine * inside + place) * count
    make.local(Kind.COPY, Buffer.SCRATCH, own, Buffer.SCRATCH, sums + mine * count, count)
    make.local(Kind.FOLD, Buffer.SCRATCH, sums, Buffer.OUTPUT, 0, count, fan=len(hosts))
    return make.done("hierarchical")
