"""The choice of options and places as a mixed-integer program, solved by HiGHS through scipy.

    minimise T   with   one option z per table, its slices on ranks (y counts those of one width), every rank's time
                        <= T and every rank's memory within its limits

For a set of tens of tables on tens of ranks; with more variables the search alone is as good and much faster. HiGHS
stops at its time limit with an incumbent and a proven bound.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lakh.errors import MissingExtra
from lakh.planner.embedding.options import ShardingLimits, ShardingOption
from lakh.planner.embedding.placement import Placement

__all__ = ["MilpAnswer", "num_variables", "solve_milp"]


@dataclass(frozen=True, slots=True)
class MilpAnswer:
    placement: Placement | None
    """None if HiGHS found nothing better than the value it was given in time."""
    bound_ms: float | None
    """Proven for these options; None if HiGHS has none."""


def num_variables(options: Sequence[Sequence[ShardingOption]], limits: ShardingLimits) -> int:
    places = {"rank": limits.ranks, "node": limits.ranks // limits.node_size, "all": 0}
    return 1 + sum(1 + places[option.reach] * len(_classes(option)) for of_table in options for option in of_table)


def solve_milp(
    options: Sequence[Sequence[ShardingOption]], limits: ShardingLimits, value_ms: float, time_limit_s: float
) -> MilpAnswer:
    """Look for a plan better than `value_ms` for at most `time_limit_s`."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ModuleNotFoundError:
        raise MissingExtra("lakh dlrm plan", "scipy", "plan") from None

    ranks, node = limits.ranks, limits.node_size
    kept = [[o for o in of_table if o.largest_ms <= value_ms] or [min(of_table, key=_largest)] for of_table in options]
    columns = 1  # the first variable is T
    upper: list[float] = [value_ms]
    entries: list[tuple[int, int, float]] = []  # row, column, value
    lower_rows: list[float] = []
    upper_rows: list[float] = []

    def row(low: float, high: float) -> int:
        lower_rows.append(low)
        upper_rows.append(high)
        return len(lower_rows) - 1

    time_rows = [row(-np.inf, 0.0) for _ in range(ranks)]
    memory_rows = {tier: [row(-np.inf, cap) for _ in range(ranks)] for tier, cap in limits.tier_bytes.items()}
    entries += [(index, 0, -1.0) for index in time_rows]

    def load(column: int, option: ShardingOption, on: Sequence[int], index: int = 0) -> None:
        for rank in on:
            entries.append((time_rows[rank], column, option.slice_ms[index]))
            entries.append((memory_rows[option.tier][rank], column, float(option.slice_bytes[index])))

    variables: list[list[tuple[ShardingOption, int, int]]] = []  # by table: option, column of z, first column of y
    for of_table in kept:
        one = row(1.0, 1.0)
        mine = []
        for option in of_table:
            chosen, columns = columns, columns + 1
            upper.append(1.0)
            entries.append((one, chosen, 1.0))
            mine.append((option, chosen, columns))
            if option.reach == "all":
                load(chosen, option, range(ranks))
                continue
            for of_width in _classes(option):
                link = row(0.0, 0.0)
                entries.append((link, chosen, -float(len(of_width))))
                for place in range(ranks if option.reach == "rank" else ranks // node):
                    entries.append((link, columns, 1.0))
                    on = [place] if option.reach == "rank" else list(range(place * node, (place + 1) * node))
                    load(columns, option, on, of_width[0])
                    upper.append(float(len(of_width)))
                    columns += 1
        variables.append(mine)

    at = np.array([entry[:2] for entry in entries])
    matrix = coo_array(([entry[2] for entry in entries], (at[:, 0], at[:, 1])), shape=(len(lower_rows), columns))
    objective = np.zeros(columns)
    objective[0] = 1.0
    integrality = np.ones(columns)
    integrality[0] = 0
    with _silent_stdout():
        solved = milp(
            objective,
            integrality=integrality,
            bounds=Bounds(np.zeros(columns), np.array(upper)),
            constraints=LinearConstraint(matrix.tocsc(), np.array(lower_rows), np.array(upper_rows)),
            options={"time_limit": time_limit_s},
        )
    bound = None if solved.mip_dual_bound is None else float(solved.mip_dual_bound)
    if solved.x is None:
        return MilpAnswer(None, bound)
    return MilpAnswer(_placement(variables, np.rint(solved.x).astype(int), limits), bound)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints debug lines to the stdout of C, even with its display off; commands print results there."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _placement(
    variables: list[list[tuple[ShardingOption, int, int]]], values: np.ndarray, limits: ShardingLimits
) -> Placement | None:
    chosen = [next((entry for entry in mine if values[entry[1]]), mine[0]) for mine in variables]
    placement = Placement.empty(limits, len(chosen), [option for option, _, _ in chosen])
    for table, (option, _, first) in enumerate(chosen):
        places = {"rank": limits.ranks, "node": limits.ranks // limits.node_size, "all": 0}[option.reach]
        homes: dict[int, int] = {}
        for number, of_width in enumerate(_classes(option) if places else []):
            begin = first + number * places
            chosen_places = [place for place in range(places) for _ in range(values[begin + place])]
            if len(chosen_places) != len(of_width):
                return None
            homes |= dict(zip(of_width, chosen_places, strict=True))
        placement.put(table, option, tuple(homes[index] for index in sorted(homes)))
    return placement if placement.fits() else None


def _classes(option: ShardingOption) -> list[list[int]]:
    """Indices of the slices, those of one time and size together."""
    found: dict[tuple[float, int], list[int]] = {}
    for index, facts in enumerate(zip(option.slice_ms, option.slice_bytes, strict=True)):
        found.setdefault(facts, []).append(index)
    return list(found.values())


def _largest(option: ShardingOption) -> float:
    return option.largest_ms
