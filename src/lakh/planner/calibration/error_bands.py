"""Error bars with a stated coverage: conformal bands of measured over predicted step time.

Held-out rows of one GPU type and one kind of configuration are ordered by their ratio; the band reaches from rank
(n + 1) x 10 % to rank (n + 1) x 90 %, interpolated between ranks. A new row of the same population then lies inside
with a probability of 80 % (split conformal prediction), whatever the distribution of the errors. A kind with too few
rows of its GPU type uses the hull of two bands: all rows of the type, and rows of the kind on all types.

The guarantee is for configurations like the published ones, run by their programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lakh.planner.stacked import Array

__all__ = ["COVERAGE", "KINDS", "ErrorBand", "configuration_kind", "conformal_bands", "with_fallback"]

COVERAGE = 0.8
LEAST_ROWS = 20
"""Of a band: with fewer, the ranks at its ends are the extremes."""
KINDS = ("one node", "several nodes", "experts", "low precision")
ALL = "all"


@dataclass(frozen=True)
class ErrorBand:
    """Measured over predicted seconds."""

    low: float
    high: float
    rows: int


def configuration_kind(num_experts: float, low_precision: float, gpus: float, node_size: float) -> str:
    """Kind of a configuration, whose errors are alike."""
    if num_experts > 0:
        return "experts"
    if low_precision > 0:
        return "low precision"
    return "one node" if gpus <= node_size else "several nodes"


def conformal_band(ratios: Array) -> ErrorBand | None:
    """The band of these rows, or None if they are too few."""
    if len(ratios) < LEAST_ROWS:
        return None
    outside = (1 - COVERAGE) / 2
    low, high = np.quantile(np.asarray(ratios, dtype=float), [outside, 1 - outside], method="weibull")
    return ErrorBand(float(low), float(high), len(ratios))


def conformal_bands(kinds: Sequence[str], ratios: Array) -> dict[str, ErrorBand]:
    """Bands of the rows of one GPU type, by kind of configuration, and of all of them."""
    ratios = np.asarray(ratios, dtype=float)
    rows = {name: [i for i, kind in enumerate(kinds) if kind == name] for name in KINDS}
    found = {name: conformal_band(ratios[some]) for name, some in rows.items()} | {ALL: conformal_band(ratios)}
    return {name: band for name, band in found.items() if band is not None}


def with_fallback(own: Mapping[str, ErrorBand], pooled: Mapping[str, ErrorBand]) -> dict[str, ErrorBand]:
    """Bands of every kind for a GPU type: its own where it has enough rows, else the hull of its type and the kind."""
    result = {}
    for kind in KINDS:
        wider = [band for band in (own.get(ALL), pooled.get(kind)) if band] or [*filter(None, [pooled.get(ALL)])]
        if kind in own:
            result[kind] = own[kind]
        elif wider:
            result[kind] = ErrorBand(min(b.low for b in wider), max(b.high for b in wider), max(b.rows for b in wider))
    return result
