"""Schedules of all_reduce, reduce_scatter and all_gather, in one tier or over the tiers of a topology.

Float addition is not associative, so every schedule adds in an order that is the same on all ranks: all ranks end with
identical bits. Costs: see collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakh.errors import UserError
from lakh.spec.reduction_steps import all_gather_flat, all_reduce_range, reduce_scatter_flat, ring_pass
from lakh.spec.schedule import Buffer, Schedule, ScheduleBuilder, StepKind, check_arguments, check_order, split_points

__all__ = ["all_gather", "all_reduce", "is_regular", "reduce_scatter"]

Places = Sequence[Sequence[str]]


def all_reduce(
    algorithm: str,
    rank: int,
    size: int,
    count: int,
    *,
    places: Places | None = None,
    order: Sequence[int] | None = None,
    codec: str = "none",
    rates: Sequence[float] | None = None,
) -> Schedule:
    """Sum of all ranks' OUTPUT, in every rank's OUTPUT.

    `places[r]` names the groups that contain rank r, innermost (its host) first; hierarchical requires it. `order` is
    the order of ranks in flat, ring and halving_doubling. `codec` applies between the outermost groups. `rates[r]`, in
    any unit, is the link rate of rank r: in flat, and between the outermost groups of hierarchical, slower ranks own
    smaller parts (`split_points`). Rates are ignored with a codec.
    """
    check_arguments(algorithm, rank, size, count)
    build = ScheduleBuilder()
    if algorithm == "hierarchical":
        if places is None:
            raise UserError("hierarchical all_reduce", "has no places", "give the host, rack, ... of each rank")
        if is_regular(places):
            _hierarchical(build, rank, places, 0, list(range(size)), 0, count, codec, rates)
        else:
            _by_leaders(build, rank, places, count, codec, rates)
    else:
        ranks = check_order(order, size)
        all_reduce_range(build, algorithm, ranks, ranks.index(rank), 0, count, codec, rates)
    return build.finish(algorithm, codec)


def is_regular(places: Places) -> bool:
    """Whether all groups of a tier have the same number of ranks, so that their parts line up."""
    tiers = len(places[0])
    if any(len(place) != tiers for place in places):
        return False
    return all(
        len({len(members) for members in _group_ranks(places, range(len(places)), tier)}) == 1 for tier in range(tiers)
    )


def _group_ranks(places: Places, ranks: Sequence[int], tier: int = 0) -> list[list[int]]:
    """`ranks` by their group of `tier`, in the order of the groups' first ranks."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(tuple(places[rank][tier:]), []).append(rank)
    return list(groups.values())


def _hierarchical(
    build: ScheduleBuilder,
    rank: int,
    places: Places,
    tier: int,
    among: list[int],
    low: int,
    count: int,
    codec: str,
    rates: Sequence[float] | None,
) -> None:
    """Reduce-scatter inside the group of this tier, all-reduce the part outside it, all-gather inside.

    `among` are the ranks that hold the same part: one of each group of the tiers below.
    """
    if tier == len(places[0]):
        all_reduce_range(build, "flat", among, among.index(rank), low, count, codec, rates)
        return
    groups = _group_ranks(places, among, tier)
    ranks = next(members for members in groups if rank in members)
    me = ranks.index(rank)
    at = split_points(count, len(ranks))  # equal parts, so that every group has the same owners
    same_part = sorted(members[me] for members in groups)
    if tier == 0 and len(ranks) > 1:
        build.on_host(StepKind.HOST_REDUCE_SCATTER, low, count)
    elif len(ranks) > 1:
        reduce_scatter_flat(build, ranks, me, low, at)
    _hierarchical(build, rank, places, tier + 1, same_part, low + at[me], at[me + 1] - at[me], codec, rates)
    if tier == 0 and len(ranks) > 1:
        build.on_host(StepKind.HOST_ALL_GATHER, low, count)
    elif len(ranks) > 1:
        all_gather_flat(build, ranks, me, low, at)


def _by_leaders(
    build: ScheduleBuilder, rank: int, places: Places, count: int, codec: str, rates: Sequence[float] | None
) -> None:
    """Hosts of unequal size: reduce in each host, all-reduce among the first ranks, broadcast in each host."""
    hosts = _group_ranks(places, range(len(places)))
    ranks = next(members for members in hosts if rank in members)
    leaders = [members[0] for members in hosts]
    if len(ranks) > 1:
        build.on_host(StepKind.HOST_REDUCE_SCATTER, 0, count)
        build.on_host(StepKind.HOST_ALL_GATHER, 0, count)
    if rank == ranks[0]:
        all_reduce_range(build, "flat", leaders, leaders.index(rank), 0, count, codec, rates)
    if len(ranks) > 1:
        build.on_host(StepKind.HOST_BROADCAST, 0, count)  # fan 0: from the host's first rank


def all_gather(algorithm: str, rank: int, size: int, count: int, *, places: Places | None = None) -> Schedule:
    """INPUT (count) of every rank, concatenated in OUTPUT (size * count)."""
    check_arguments(algorithm, rank, size, count)
    if algorithm == "hierarchical":
        return _all_gather_by_host(rank, _equal_hosts(places), count)
    build = ScheduleBuilder()
    build.local(StepKind.COPY, Buffer.INPUT, 0, Buffer.OUTPUT, rank * count, count)
    build.next_stage()
    if size > 1:
        at = split_points(size * count, size)
        if algorithm == "ring":
            ring_pass(build, range(size), rank, 0, at, reduces=False)
        else:
            all_gather_flat(build, range(size), rank, 0, at)
    return build.finish(algorithm)


def reduce_scatter(algorithm: str, rank: int, size: int, count: int, *, places: Places | None = None) -> Schedule:
    """Part `rank` (count) of the sum of all ranks' INPUT (size * count), in OUTPUT (count)."""
    check_arguments(algorithm, rank, size, count)
    if algorithm == "hierarchical":
        return _reduce_scatter_by_host(rank, _equal_hosts(places), count)
    build = ScheduleBuilder()
    build.reserve_scratch(size * count)
    if algorithm == "ring" and size > 1:
        # In place in scratch: the input must stay unchanged.
        build.local(StepKind.COPY, Buffer.INPUT, 0, Buffer.SCRATCH, 0, size * count)
        build.next_stage()
        at = split_points(size * count, size)
        ring_pass(build, range(size), rank, 0, at, reduces=True, buffer=Buffer.SCRATCH)
        build.local(StepKind.COPY, Buffer.SCRATCH, rank * count, Buffer.OUTPUT, 0, count)
        return build.finish("ring")
    for peer in range(size):
        if peer != rank:
            build.send(peer, peer * count, count, Buffer.INPUT)
            build.recv(peer, peer * count, count, Buffer.SCRATCH)
    build.next_stage()
    build.local(StepKind.COPY, Buffer.INPUT, rank * count, Buffer.SCRATCH, rank * count, count)
    build.local(StepKind.FOLD, Buffer.SCRATCH, 0, Buffer.OUTPUT, 0, count, fan=size)
    return build.finish("flat")


def _equal_hosts(places: Places | None) -> list[list[int]]:
    if places is None or not is_regular(places):
        raise UserError("hierarchical schedule", "requires hosts with equally many ranks", "choose flat or ring")
    return _group_ranks(places, range(len(places)))


def _all_gather_by_host(rank: int, hosts: list[list[int]], count: int) -> Schedule:
    """Each part enters every other host once, at the rank with the same index there, and is then shared inside."""
    build = ScheduleBuilder()
    mine = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    index, inside = hosts[mine].index(rank), len(hosts[0])
    by_host = [peer for ranks in hosts for peer in ranks]
    target = Buffer.OUTPUT if by_host == sorted(by_host) else Buffer.SCRATCH
    if target == Buffer.SCRATCH:
        build.reserve_scratch(len(by_host) * count)
    build.local(StepKind.COPY, Buffer.INPUT, 0, target, (mine * inside + index) * count, count)
    build.next_stage()
    for number, ranks in enumerate(hosts):
        if number != mine:
            build.send(ranks[index], 0, count, Buffer.INPUT)
            build.recv(ranks[index], (number * inside + index) * count, count, target)
    build.next_stage()
    for number in range(len(hosts) if inside > 1 else 0):
        build.on_host(StepKind.HOST_ALL_GATHER, number * inside * count, inside * count, target)
    if target == Buffer.SCRATCH:
        for at, peer in enumerate(by_host):
            build.local(StepKind.COPY, target, at * count, Buffer.OUTPUT, peer * count, count)
    return build.finish("hierarchical")


def _reduce_scatter_by_host(rank: int, hosts: list[list[int]], count: int) -> Schedule:
    """Each host reduces among its ranks first; its sum for a rank elsewhere is sent by the rank with the same index."""
    build = ScheduleBuilder()
    mine = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    index, inside = hosts[mine].index(rank), len(hosts[0])
    sums = inside * len(hosts) * count  # behind the input, one sum of each host for this rank
    build.reserve_scratch(sums + len(hosts) * count)
    for at, peer in enumerate(peer for ranks in hosts for peer in ranks):
        build.local(StepKind.COPY, Buffer.INPUT, peer * count, Buffer.SCRATCH, at * count, count)
    build.next_stage()
    for number in range(len(hosts) if inside > 1 else 0):
        build.on_host(StepKind.HOST_REDUCE_SCATTER, number * inside * count, inside * count, Buffer.SCRATCH)
    for number, ranks in enumerate(hosts):
        if number != mine:
            build.send(ranks[index], (number * inside + index) * count, count, Buffer.SCRATCH)
            build.recv(ranks[index], sums + number * count, count, Buffer.SCRATCH)
    build.next_stage()
    own = (mine * inside + index) * count
    build.local(StepKind.COPY, Buffer.SCRATCH, own, Buffer.SCRATCH, sums + mine * count, count)
    build.local(StepKind.FOLD, Buffer.SCRATCH, sums, Buffer.OUTPUT, 0, count, fan=len(hosts))
    return build.finish("hierarchical")
