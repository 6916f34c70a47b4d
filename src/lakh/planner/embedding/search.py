"""Which option for each table: split search.

Splitting a table adds work (narrow rows are slower, ids are sent to more ranks) but makes its largest piece shorter.
`split_search` tries targets for the slowest rank, from the lower bound upwards: for each, every table takes its
option of least work whose pieces are shorter than the target, and the pieces are placed. Its first candidate leaves
every table whole, so the result is never worse than LPT. It is deterministic. ruin_recreate.py improves its plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lakh.planner.embedding.bound import base_ms
from lakh.planner.embedding.options import ShardingLimits, ShardingOption
from lakh.planner.embedding.placement import Placement, place_differencing, place_longest_first

__all__ = ["split_search", "whole_tables"]

TARGETS = (1.0, 1.0002, 1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0)
"""Targets of the slowest rank, as multiples of the lower bound."""
DIFFERENCING_STEPS = 100_000  # pieces x ranks: 0.2 s of Karmarkar-Karp; with more pieces LPT is as good
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
