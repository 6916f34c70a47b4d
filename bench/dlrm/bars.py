"""What lakh aims at beside its peers, and whether a row reaches it."""

from __future__ import annotations

from bench.harness import BenchRow

__all__ = [
    "EMBEDDING_BAG_ADAM",
    "FBGEMM_ADAGRAD",
    "GPU_LOOKUP",
    "GPU_UPDATE",
    "PLANNER",
    "WHOLE_STEP",
    "with_bar",
]

PLANNER, FBGEMM_ADAGRAD, EMBEDDING_BAG_ADAM, WHOLE_STEP = 1.2, 1.3, 3.0, 1.3
GPU_LOOKUP, GPU_UPDATE = 0.6, 0.35  # of the speed of a copy


def with_bar(row: BenchRow, at_least: float | None, *, possible: float | None = None) -> BenchRow:
    """The row with its bar for `ratio`. `possible`: the ratio of the best plan, from a lower bound."""
    ratio = row.get("ratio")
    if at_least is None or ratio is None:
        return row
    reached = "yes" if ratio >= at_least else "no"
    if ratio < at_least and possible is not None and possible < at_least:
        reached = f"no plan can: the bound allows {possible:.2f}"
    return {**row, "at_least": at_least, "reached": reached}
