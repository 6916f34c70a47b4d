"""Ruin and recreate: take a few tables out, at least one from the slowest rank, and put each back with its best option
and place. It improves plans of small sets, in tens of thousands of rounds, and is compiled by numba.

Legend: T tables, O options of all tables, S slices of an option at most, R ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lakh.planner.compiled import compiled
from lakh.planner.embedding.options import ShardingOption
from lakh.planner.embedding.placement import Placement

__all__ = ["ruin_and_recreate"]

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_REMOVED = 6  # tables taken out in one round, besides one of the slowest rank
BLINK = 0.1  # share of a table's options that a round overlooks: the greedy choice alone repeats itself
FIRST_TOLERANCE = 0.05  # how much worse a state may become at first
ENOUGH = 1e-4  # relative distance to the bound at which the search stops
ON_RANK, ON_NODE, ON_ALL = 0, 1, 2
REACH = {"rank": ON_RANK, "node": ON_NODE, "all": ON_ALL}


class _Options(NamedTuple):
    """All options of all tables."""

    reach_O: Integers
    tier_O: Integers
    slices_O: Integers
    ms_OS: Floats
    bytes_OS: Floats


class _Ranks(NamedTuple):
    """What the ranks have, and what the placed tables take of it."""

    node_size: int
    caps_M: Floats
    loads_R: Floats
    used_MR: Floats


def ruin_and_recreate(
    options: Sequence[Sequence[ShardingOption]], start: Placement, bound_ms: float, *, rounds: int, seed: int = 0
) -> Placement:
    """Improve a placement for `rounds` rounds; never returns a worse one. Deterministic."""
    limits = start.limits
    tiers = list(limits.tier_bytes)
    flat = [option for of_table in options for option in of_table]
    first_T = np.cumsum([0, *map(len, options)])
    most = max(len(option.widths) for option in flat)
    reach_O = np.array([REACH[option.reach] for option in flat])
    tier_O = np.array([tiers.index(option.tier) for option in flat])
    slices_O = np.array([len(option.widths) for option in flat])
    ms_OS, bytes_OS = np.zeros((len(flat), most)), np.zeros((len(flat), most))
    for number, option in enumerate(flat):
        ms_OS[number, : len(option.widths)] = option.slice_ms
        bytes_OS[number, : len(option.widths)] = option.slice_bytes
    chosen_T = np.array([first_T[t] + list(options[t]).index(option) for t, option in enumerate(start.chosen)])
    homes_TS = np.zeros((len(options), most), np.int64)
    for table, homes in enumerate(start.homes):
        homes_TS[table, : len(homes)] = homes
    used_MR = np.array([start.used[tier] for tier in tiers])
    caps_M = np.array([limits.tier_bytes[tier] for tier in tiers])
    all_options = _Options(reach_O, tier_O, slices_O, ms_OS, bytes_OS)
    ranks = _Ranks(limits.node_size, caps_M, start.loads.copy(), used_MR)
    _search(all_options, ranks, first_T, chosen_T, homes_TS, bound_ms, rounds, seed)
    found = Placement.empty(limits, len(options), [flat[number] for number in chosen_T])
    for table, option in enumerate(found.chosen):
        count = {"rank": len(option.widths), "node": 1, "all": 0}[option.reach]
        found.put(table, option, tuple(int(home) for home in homes_TS[table, :count]))
    return found if found.fits() and found.bottleneck_ms < start.bottleneck_ms else start


@compiled
def _power(value: float) -> float:
    """The search minimises the sum of the 12th powers of the ranks' times: a smooth stand-in for their maximum."""
    square = value * value
    fourth = square * square
    return fourth * fourth * fourth


@compiled
def _put(options: _Options, ranks: _Ranks, option: int, homes_S: Integers, sign: float) -> None:
    """Add a table with this option and these homes to the ranks, or take it away with a sign of -1."""
    reach_O, tier_O, slices_O, ms_OS, bytes_OS = options
    node, _, loads_R, used_MR = ranks
    tier = tier_O[option]
    if reach_O[option] == 2:
        for rank in range(len(loads_R)):
            loads_R[rank] += sign * ms_OS[option, 0]
            used_MR[tier, rank] += sign * bytes_OS[option, 0]
    elif reach_O[option] == 1:
        for rank in range(homes_S[0] * node, (homes_S[0] + 1) * node):
            loads_R[rank] += sign * ms_OS[option, 0]
            used_MR[tier, rank] += sign * bytes_OS[option, 0]
    else:
        for index in range(slices_O[option]):
            loads_R[homes_S[index]] += sign * ms_OS[option, index]
            used_MR[tier, homes_S[index]] += sign * bytes_OS[option, index]


@compiled
def _best_insertion(
    options: _Options, ranks: _Ranks, first: int, end: int, unit: float, homes_S: Integers, trial_S: Integers
) -> int:
    """The option of a table whose best place adds least, -1 if none has memory; writes its ranks or node to homes_S."""
    reach_O, tier_O, slices_O, ms_OS, bytes_OS = options
    node, caps_M, loads_R, used_MR = ranks
    order = np.argsort(loads_R, kind="mergesort")
    best, best_score = -1, np.inf
    for option in range(first, end):
        if np.random.random() < BLINK and option != first:
            continue
        tier, cap, reach = tier_O[option], caps_M[tier_O[option]], reach_O[option]
        score = 0.0
        fits = True
        if reach == 2:
            for rank in range(len(loads_R)):
                fits = fits and used_MR[tier, rank] + bytes_OS[option, 0] <= cap
                score += _power((loads_R[rank] + ms_OS[option, 0]) / unit) - _power(loads_R[rank] / unit)
        elif reach == 1:
            place, least = -1, np.inf
            for number in range(len(loads_R) // node):
                slowest, has_room = 0.0, True
                for rank in range(number * node, (number + 1) * node):
                    slowest = max(slowest, loads_R[rank])
                    has_room = has_room and used_MR[tier, rank] + bytes_OS[option, 0] <= cap
                if has_room and slowest < least:
                    place, least = number, slowest
            fits = place >= 0
            trial_S[0] = place
            if fits:
                for rank in range(place * node, (place + 1) * node):
                    score += _power((loads_R[rank] + ms_OS[option, 0]) / unit) - _power(loads_R[rank] / unit)
        else:
            count = 0
            for rank in order:
                if count == slices_O[option]:
                    break
                if used_MR[tier, rank] + bytes_OS[option, count] <= cap:
                    trial_S[count] = rank
                    score += _power((loads_R[rank] + ms_OS[option, count]) / unit) - _power(loads_R[rank] / unit)
                    count += 1
            fits = count == slices_O[option]
        if fits and score < best_score:
            best, best_score = option, score
            homes_S[:] = trial_S
    return best


@compiled
def _total(loads_R: Floats, unit: float) -> float:
    total = 0.0
    for load in loads_R:
        total += _power(load / unit)
    return float(total ** (1 / 12))


@compiled
def _search(
    options: _Options,
    ranks: _Ranks,
    first_T: Integers,
    chosen_T: Integers,
    homes_TS: Integers,
    unit: float,
    rounds: int,
    seed: int,
) -> None:
    """Leaves the best state in chosen_T and homes_TS."""
    np.random.seed(seed)
    reach_O, slices_O, node, loads_R = options.reach_O, options.slices_O, ranks.node_size, ranks.loads_R
    tables = len(chosen_T)
    best_T, best_TS, best_ms = chosen_T.copy(), homes_TS.copy(), loads_R.max()
    score = _total(loads_R, unit)
    removed = np.empty(MOST_REMOVED + 1, np.int64)
    before_chosen, before_homes = (
        np.empty(MOST_REMOVED + 1, np.int64),
        np.empty((MOST_REMOVED + 1, homes_TS.shape[1]), np.int64),
    )
    trial_S = np.zeros(homes_TS.shape[1], np.int64)
    for turn in range(rounds):
        if best_ms <= unit * (1 + ENOUGH):
            break
        slowest = loads_R.argmax()
        seen = 0
        for table in range(tables):  # one of the tables on the slowest rank, each with the same chance
            option = chosen_T[table]
            is_on = reach_O[option] == 2 or (reach_O[option] == 1 and homes_TS[table, 0] == slowest // node)
            if reach_O[option] == 0:
                for index in range(slices_O[option]):
                    is_on = is_on or homes_TS[table, index] == slowest
            if is_on:
                seen += 1
                if np.random.random() * seen < 1:
                    removed[0] = table
        if not seen:
            removed[0] = np.random.randint(tables)
        count = 1
        for _ in range(1 + np.random.randint(MOST_REMOVED)):
            table = np.random.randint(tables)
            is_new = True
            for number in range(count):
                is_new = is_new and removed[number] != table
            if is_new:
                removed[count] = table
                count += 1
        if np.random.random() < 0.5:
            np.random.shuffle(removed[:count])
        for number in range(count):
            table = removed[number]
            before_chosen[number] = chosen_T[table]
            before_homes[number] = homes_TS[table]
            _put(options, ranks, chosen_T[table], homes_TS[table], -1.0)
        placed = 0
        for number in range(count):
            table = removed[number]
            option = _best_insertion(options, ranks, first_T[table], first_T[table + 1], unit, homes_TS[table], trial_S)
            if option < 0:
                break
            chosen_T[table] = option
            _put(options, ranks, option, homes_TS[table], 1.0)
            placed += 1
        new = _total(loads_R, unit)
        tolerance = FIRST_TOLERANCE * max(0.0, 1 - 1.2 * turn / rounds) * np.random.random()
        if placed == count and new <= score * (1 + tolerance):
            score = new
            if loads_R.max() < best_ms:
                best_ms = loads_R.max()
                best_T[:] = chosen_T
                best_TS[:] = homes_TS
            continue
        for number in range(placed):
            table = removed[number]
            _put(options, ranks, chosen_T[table], homes_TS[table], -1.0)
        for number in range(count):
            table = removed[number]
            chosen_T[table] = before_chosen[number]
            homes_TS[table] = before_homes[number]
            _put(options, ranks, chosen_T[table], homes_TS[table], 1.0)
    chosen_T[:] = best_T
    homes_TS[:] = best_TS
