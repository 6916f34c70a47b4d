"""Collective algorithms as data: each is a function that returns the steps of one rank.

The native core of c3 runs the steps (schedule.py), the verifier (`lakh.c3.verify`) proves them for any number of ranks,
`collective_cost` prices them in closed form. Here: those that copy, to or from a root or all to all; reductions.py has
those that reduce.

Cost per rank, P ranks and S bytes (`bytes_sent`, `num_stages` of the result say the same, and tests hold them to it):

    all_reduce       flat                2 stages              2(P-1)/P * S    every rank talks to every rank; who owns
                                                                               a part w of S sends (1 + (P-2) w) * S
                     halving_doubling    2 log2(P) stages      2(P-1)/P * S    P a power of two; else 2 more stages
                     ring                2(P-1) stages         2(P-1)/P * S    talks to two neighbours only
                     hierarchical        2 stages a tier       outer tiers carry only 1/(ranks inside) of S
    all_gather, reduce_scatter           half of the above     hierarchical: by host, 1/(ranks inside) between hosts
    broadcast        tree                log2(P) stages        S for each child
"""

from __future__ import annotations

from collections.abc import Sequence

from lakh.errors import UserError
from lakh.spec.reductions import all_gather, all_reduce, is_regular, reduce_scatter
from lakh.spec.schedule import (
    ALGORITHMS,
    GROUP,
    Buffer,
    Kind,
    Schedule,
    Step,
    Steps,
    check,
    codec_bytes,
    cuts,
    share,
)

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
    "cuts",
    "gather",
    "is_regular",
    "reduce",
    "reduce_scatter",
    "scatter",
    "share",
]


def broadcast(rank: int, size: int, count: int, root: int, order: Sequence[int] | None = None) -> Schedule:
    """OUTPUT of the root in everybody's OUTPUT, along a binomial tree.

    `order` names all ranks, the slowest last: the later half are leaves, for whom nobody waits.
    """
    check("flat", rank, size, count, root)
    make = Steps()
    team = _from_root(size, root, order)
    place = team.index(rank)
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            make.send(team[place + distance], 0, count)
        elif distance <= place < 2 * distance:
            make.recv(team[place - distance], 0, count)
        make.next_stage()
        distance *= 2
    return make.done("tree")


def reduce(rank: int, size: int, count: int, root: int, order: Sequence[int] | None = None) -> Schedule:
    """The sum of everybody's INPUT in the root's OUTPUT: `broadcast`'s tree, backwards. Inputs stay as they are."""
    check("flat", rank, size, count, root)
    make = Steps()
    make.scratch(count)
    make.local(Kind.COPY, Buffer.INPUT, 0, Buffer.SCRATCH, 0, count)
    make.next_stage()
    team = _from_root(size, root, order)
    place = team.index(rank)
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance and size > 1:
        if distance <= place < 2 * distance:
            make.send(team[place - distance], 0, count, Buffer.SCRATCH)
            make.next_stage()
            break
        if place < distance and place + distance < size:
            make.recv_reduce(team[place + distance], 0, count, Buffer.SCRATCH)
        make.next_stage()
        distance //= 2
    if rank == root:
        make.local(Kind.COPY, Buffer.SCRATCH, 0, Buffer.OUTPUT, 0, count)
    return make.done("tree")


def _from_root(size: int, root: int, order: Sequence[int] | None) -> list[int]:
    team = list(order) if order is not None else [(root + place) % size for place in range(size)]
    if sorted(team) != list(range(size)):
        raise UserError("order", f"{team} does not name each of {size} ranks once", "give a permutation")
    return [root, *(rank for rank in team if rank != root)]


def gather(rank: int, size: int, count: int, root: int) -> Schedule:
    check("flat", rank, size, count, root)
    make = Steps()
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
    check("flat", rank, size, count, root)
    make = Steps()
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
    make = Steps()
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
    check("flat", rank, size, 0)
    make = Steps()
    make.scratch(2)
    distance = 1
    while distance < size:
        make.send((rank + distance) % size, 0, 1, Buffer.SCRATCH)
        make.recv((rank - distance) % size, 1, 1, Buffer.SCRATCH)
        make.next_stage()
        distance *= 2
    return make.done("dissemination")
