"""Which option for each table: split search, then ruin and recreate.

Splitting a table adds work (narrow rows are slower, ids are sent to more ranks) but makes its largest piece shorter.
`split_search` tries targets for the slowest rank, from the lower bound upwards: for each, every table takes its
option of least work whose pieces are shorter than the target, and the pieces are placed. Its first candidate leaves
every table whole, so the result is never worse than LPT. `ruin_and_recreate` improves small sets: it takes a few
tables out, at least one from the slowest rank, and puts each back with its best option and place. Both are
deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from lakh.planner.embedding.bound import base_ms
from lakh.planner.embedding.options import ShardingLimits, ShardingOption
from lakh.planner.embedding.placement import Placement, best_node, place_differencing, place_longest_first

__all__ = ["ruin_and_recreate", "split_search", "whole_tables"]

TARGETS = (1.0, 1.0002, 1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0)
"""Targets of the slowest rank, as multiples of the lower bound."""
DIFFERENCING_STEPS = 100_000  # pieces x ranks: 0.2 s of Karmarkar-Karp; with more pieces LPT is as good
NORM = 12  # the search minimises this norm of the ranks' times: a smooth stand-in for their maximum
MOST_REMOVED = 6  # tables taken out in one round, besides one of the slowest rank
BLINK = 0.1  # share of a table's options that a round overlooks: the greedy choice alone repeats itself
FIRST_TOLERANCE = 0.05  # how much worse a state may become at first
ENOUGH = 1e-4  # relative distance to the bound at which the search stops


def whole_tables(options: Sequence[Sequence[ShardingOption]], limits: ShardingLimits) -> Placement | None:
    """LPT of unsplit tables: each on one rank if it fits there, otherwise with its option of least work."""
    whole = [
        next((o for o in of_table if o.reach == "rank" and len(o.widths) == 1), None)
        or min(of_table, key=lambda o: o.work_ms(limits.ranks, limits.node_size))
        for of_table in options
    ]
    return place_longest_first(whole, limits)


def split_search(
    options: Sequence[Sequence[ShardingOption]], limits: ShardingLimits, bound_ms: float
) -> tuple[Placement | None, str]:
    """The best placement over all targets, and the name of the method that found it."""
    best, engine = whole_tables(options, limits), "LPT"
    base = base_ms(options)
    by_work = [
        sorted(of_table, key=lambda o: (o.work_ms(limits.ranks, limits.node_size), len(o.widths)))
        for of_table in options
    ]
    tried = set()
    for factor in TARGETS:
        if best is not None and best.bottleneck_ms <= bound_ms * (1 + ENOUGH):
            break
        room = (bound_ms * factor - base) * (1 + 1e-9)
        chosen = [
            next((o for o in of_table if o.largest_ms <= room), None) or min(of_table, key=lambda o: o.largest_ms)
            for of_table in by_work
        ]
        if (key := tuple(map(id, chosen))) in tried:
            continue
        tried.add(key)
        for name, found in _placements(chosen, limits):
            if found is not None and (best is None or found.bottleneck_ms < best.bottleneck_ms):
                best, engine = found, name
    return best, engine


def _placements(chosen: list[ShardingOption], limits: ShardingLimits) -> Iterator[tuple[str, Placement | None]]:
    longest_first = place_longest_first(chosen, limits)
    yield "split search, LPT", longest_first
    if longest_first is None:
        yield "split search, LPT by size", place_longest_first(chosen, limits, largest_first=True)
    if sum(len(option.widths) for option in chosen) * limits.ranks <= DIFFERENCING_STEPS:
        yield "split search, Karmarkar-Karp", place_differencing(chosen, limits)


def ruin_and_recreate(
    options: Sequence[Sequence[ShardingOption]], start: Placement, bound_ms: float, *, rounds: int, seed: int = 0
) -> Placement:
    """Improve a placement for `rounds` rounds; never returns a worse one."""
    chance = random.Random(seed)
    tables = len(options)
    current, best = _copy(start), _copy(start)
    score = _norm(current, bound_ms)
    for turn in range(rounds):
        if best.bottleneck_ms <= bound_ms * (1 + ENOUGH):
            break
        slowest = int(current.loads.argmax())
        removable = [t for t in range(tables) if _is_on(current, t, slowest)] or list(range(tables))
        removed = {
            chance.choice(removable),
            *chance.sample(range(tables), min(tables, chance.randint(1, MOST_REMOVED))),
        }
        before = {table: (current.chosen[table], current.homes[table]) for table in removed}
        for table in removed:
            current.put(table, *before[table], sign=-1)
        placed = _recreate(current, options, sorted(removed), bound_ms, chance)
        new = _norm(current, bound_ms)
        tolerance = FIRST_TOLERANCE * max(0.0, 1 - 1.2 * turn / rounds) * chance.random()
        if len(placed) == len(removed) and new <= score * (1 + tolerance):
            score = new
            if current.bottleneck_ms < best.bottleneck_ms:
                best = _copy(current)
            continue
        for table in placed:
            current.put(table, current.chosen[table], current.homes[table], sign=-1)
        for table in removed:
            current.put(table, *before[table])
    return best


def _recreate(
    current: Placement,
    options: Sequence[Sequence[ShardingOption]],
    removed: list[int],
    unit_ms: float,
    chance: random.Random,
) -> list[int]:
    """Put tables back, one after another with its best option and place; returns those that found one."""
    if chance.random() < 0.5:
        chance.shuffle(removed)
    else:
        removed.sort(key=lambda t: -min(option.largest_ms for option in options[t]))
    placed: list[int] = []
    for table in removed:
        seen = [option for option in options[table] if chance.random() > BLINK] or options[table]
        found = _best_insertion(current, seen, unit_ms)
        if found is None:
            break
        current.put(table, *found)
        placed.append(table)
    return placed


def _best_insertion(
    placement: Placement, options: Sequence[ShardingOption], unit_ms: float
) -> tuple[ShardingOption, tuple[int, ...]] | None:
    limits, loads = placement.limits, placement.loads
    order = np.argsort(loads, kind="stable")
    powers = (loads / unit_ms) ** NORM
    found, best_score = None, np.inf
    for option in options:
        used, cap = placement.used[option.tier], limits.tier_bytes[option.tier]
        if option.reach == "all":
            if float(used.max()) + option.slice_bytes[0] > cap:
                continue
            homes: tuple[int, ...] = ()
            score = float((((loads + option.slice_ms[0]) / unit_ms) ** NORM).sum())
        elif option.reach == "node":
            node = best_node(placement, option)
            if node is None:
                continue
            homes = (node,)
            part = slice(node * limits.node_size, (node + 1) * limits.node_size)
            added = ((loads[part] + option.slice_ms[0]) / unit_ms) ** NORM
            score = float(powers.sum() + (added - powers[part]).sum())
        else:
            slices = len(option.widths)
            if slices > limits.ranks:
                continue
            room = order[used[order] + max(option.slice_bytes) <= cap]
            if len(room) < slices:
                continue
            ranks = room[:slices]
            homes = tuple(int(rank) for rank in ranks)
            added = ((loads[ranks] + np.array(option.slice_ms)) / unit_ms) ** NORM
            score = float(powers.sum() + (added - powers[ranks]).sum())
        if score < best_score:
            found, best_score = (option, homes), score
    return found


def _norm(placement: Placement, unit_ms: float) -> float:
    return float(((placement.loads / unit_ms) ** NORM).sum() ** (1 / NORM))


def _is_on(placement: Placement, table: int, rank: int) -> bool:
    reach, homes = placement.chosen[table].reach, placement.homes[table]
    if reach == "node":
        return homes == (rank // placement.limits.node_size,)
    return reach == "all" or rank in homes


def _copy(placement: Placement) -> Placement:
    used = {tier: values.copy() for tier, values in placement.used.items()}
    return Placement(placement.limits, placement.loads.copy(), used, list(placement.chosen), list(placement.homes))
