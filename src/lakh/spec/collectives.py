"""Collective algorithms as data: each function returns the schedule of one rank.

c3's native core executes schedules (schedule.py), a verifier (tests/unit/c3/schedule_verifier.py) proves them for any
number of ranks, and collective_cost.py gives their cost in closed form, which the planner uses. This module has
broadcast, reduce, gather, scatter, all_to_all and barrier; reductions.py has all_reduce, reduce_scatter and all_gather.

Cost per rank, P ranks and S bytes (tests compare `bytes_sent` and `num_stages` with it):

    all_reduce       flat                2 stages              2(P-1)/P * S    all-to-all connections; the owner of a
                                                                               fraction w sends (1 + (P-2) w) * S
                     halving_doubling    2 log2(P) stages      2(P-1)/P * S    P a power of two; else 2 more stages
                     ring                2(P-1) stages         2(P-1)/P * S    two neighbours only
                     hierarchical        2 stages per tier     outer tiers carry 1/(ranks inside) of S
    all_gather, reduce_scatter           half of the above     hierarchical: by host, 1/(ranks inside) between hosts
    broadcast        tree                log2(P) stages        S for each child
"""

from __future__ import annotations

from collections.abc import Sequence

from lakh.errors import UserError
from lakh.spec.reductions import all_gather, all_reduce, is_regular, reduce_scatter
from lakh.spec.schedule import Buffer, Schedule, ScheduleBuilder, StepKind, check_arguments, check_order

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "is_regular",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def broadcast(rank: int, size: int, count: int, root: int, order: Sequence[int] | None = None) -> Schedule:
    """Copy the root's OUTPUT to every rank's OUTPUT along a binomial tree.

    `order` lists all ranks, slowest last: the second half are leaves, on which no other rank depends.
    """
    check_arguments("flat", rank, size, count, root)
    build = ScheduleBuilder()
    ranks = _root_first(size, root, order)
    position = ranks.index(rank)
    distance = 1
    while distance < size:
        if position < distance and position + distance < size:
            build.send(ranks[position + distance], 0, count)
        elif distance <= position < 2 * distance:
            build.recv(ranks[position - distance], 0, count)
        build.next_stage()
        distance *= 2
    return build.finish("tree")


def reduce(rank: int, size: int, count: int, root: int, order: Sequence[int] | None = None) -> Schedule:
    """Sum of all ranks' INPUT in the root's OUTPUT: the broadcast tree in reverse. Inputs are unchanged."""
    check_arguments("flat", rank, size, count, root)
    build = ScheduleBuilder()
    build.reserve_scratch(count)
    build.local(StepKind.COPY, Buffer.INPUT, 0, Buffer.SCRATCH, 0, count)
    build.next_stage()
    ranks = _root_first(size, root, order)
    position = ranks.index(rank)
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance and size > 1:
        if distance <= position < 2 * distance:
            build.send(ranks[position - distance], 0, count, Buffer.SCRATCH)
            build.next_stage()
            break
        if position < distance and position + distance < size:
            build.recv_reduce(ranks[position + distance], 0, count, Buffer.SCRATCH)
        build.next_stage()
        distance //= 2
    if rank == root:
        build.local(StepKind.COPY, Buffer.SCRATCH, 0, Buffer.OUTPUT, 0, count)
    return build.finish("tree")


def _root_first(size: int, root: int, order: Sequence[int] | None) -> list[int]:
    ranks = check_order(order, size) if order is not None else [(root + index) % size for index in range(size)]
    return [root, *(rank for rank in ranks if rank != root)]


def gather(rank: int, size: int, count: int, root: int) -> Schedule:
    check_arguments("flat", rank, size, count, root)
    build = ScheduleBuilder()
    if rank == root:
        build.local(StepKind.COPY, Buffer.INPUT, 0, Buffer.OUTPUT, rank * count, count)
        build.next_stage()
        for peer in range(size):
            if peer != rank:
                build.recv(peer, peer * count, count)
    else:
        build.send(root, 0, count, Buffer.INPUT)
    return build.finish("flat")


def scatter(rank: int, size: int, count: int, root: int) -> Schedule:
    check_arguments("flat", rank, size, count, root)
    build = ScheduleBuilder()
    if rank == root:
        build.local(StepKind.COPY, Buffer.INPUT, rank * count, Buffer.OUTPUT, 0, count)
        build.next_stage()
        for peer in range(size):
            if peer != rank:
                build.send(peer, peer * count, count, Buffer.INPUT)
    else:
        build.recv(root, 0, count)
    return build.finish("flat")


def all_to_all(rank: int, size: int, sends: Sequence[int], receives: Sequence[int]) -> Schedule:
    """Send `sends[r]` elements of INPUT to rank r and receive `receives[r]` from it, each in rank order."""
    if len(sends) != size or len(receives) != size:
        raise UserError("all_to_all", f"{len(sends)} and {len(receives)} splits for {size} ranks", "give one per rank")
    build = ScheduleBuilder()
    send_at, recv_at = [0], [0]
    for peer in range(size):
        send_at.append(send_at[-1] + sends[peer])
        recv_at.append(recv_at[-1] + receives[peer])
    build.local(StepKind.COPY, Buffer.INPUT, send_at[rank], Buffer.OUTPUT, recv_at[rank], sends[rank])
    build.next_stage()
    for distance in range(1, size):  # every rank starts with a different peer
        target, source = (rank + distance) % size, (rank - distance) % size
        build.send(target, send_at[target], sends[target], Buffer.INPUT)
        build.recv(source, recv_at[source], receives[source])
    return build.finish("flat")


def barrier(rank: int, size: int) -> Schedule:
    """Dissemination barrier: after log2(P) stages every rank depends on every other."""
    check_arguments("flat", rank, size, 0)
    build = ScheduleBuilder()
    build.reserve_scratch(2)
    distance = 1
    while distance < size:
        build.send((rank + distance) % size, 0, 1, Buffer.SCRATCH)
        build.recv((rank - distance) % size, 1, 1, Buffer.SCRATCH)
        build.next_stage()
        distance *= 2
    return build.finish("dissemination")
