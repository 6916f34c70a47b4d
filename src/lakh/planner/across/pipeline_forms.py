"""Closed forms of pipeline schedules: the bubble, and what slow boundaries add to it.

p stages, m micro-batches of t seconds on a stage, v chunks, a boundary with w stages behind it and a delay of d.

    kind         bubble, m >= p     each slow boundary adds, beside the way there and back
    gpipe        (p-1) t            nothing
    1f1b         (p-1) t            d for each of m - w micro-batches: the next forward pass waits for a gradient
    1f1b-deep    (p-1) t            nothing, once the warm-up is two delays deeper
    interleaved  (p-1) t/v          chunks are shorter, cross every boundary, and return to the first stage
    zb-h1        (p-1) t/3          what exceeds t/6 for each of m - w: weight gradients fill the rest
    zb-h2        (p-1) t/3, m >= 2p two thirds of what exceeds 7t/12: it runs two micro-batches ahead

The bubble counts until the last stage has ended: the optimizer waits for all of them. Fewer micro-batches leave more of
it. Timelines (schedules/timeline.py) replace these forms for the finalists of a search; a test compares the two.
"""

from __future__ import annotations

import numpy as np

from lakh.planner.across.layout_rows import DEEP, GPIPE, INTERLEAVED, KINDS, ONE_F_ONE_B, ZB_H1, ZB_H2
from lakh.planner.stacked import Array

__all__ = ["boundary_wait_s", "bubble_stages"]


def bubble_stages(kind: Array, chunks: Array, stages: int, micro_batches: Array) -> Array:
    """The bubble in units of a micro-batch on a stage; forward pass and both gradients take the same time."""
    p, m = stages, micro_batches
    plain = p - 1.0 + 0.0 * m
    forms = {
        GPIPE: plain,
        ONE_F_ONE_B: plain,
        DEEP: plain,
        INTERLEAVED: np.maximum(p - m, 0.0) + (np.minimum(m, p) - 1) / chunks,
        ZB_H1: (2 * plain - np.minimum(m - 1, p - 1)) / 3,  # less the weight gradients that fill the end
        ZB_H2: (2 * plain - np.minimum(m / 2, p - 1)) / 3,
    }
    return _of_kind(kind, forms)


def _of_kind(kind: Array, forms: dict[int, Array]) -> Array:
    return np.choose(np.asarray(kind, dtype=int), [forms[number] for number in range(len(KINDS))])


def boundary_wait_s(
    kind: Array, chunks: Array, stages: int, micro_batches: Array, stage_s: Array, delays: list[tuple[int, Array]]
) -> Array:
    """Seconds that slow boundaries add to a pipeline; `delays` are (stages before the boundary, seconds one way)."""
    if not delays:
        return 0.0 * stage_s
    total = sum(delay for _, delay in delays)
    chunk_s = stage_s / chunks
    waits = []
    for before, delay in delays:
        behind = stages - before
        later = np.maximum(micro_batches - behind, 0.0)  # micro-batches after the warm-up
        excess = {
            GPIPE: 0.0 * delay,
            ONE_F_ONE_B: delay * later,
            DEEP: 0.0 * delay,
            ZB_H1: np.maximum(delay * np.minimum(behind, later), (delay - stage_s / 6) * later),
            ZB_H2: np.maximum(2 * delay - 7 / 6 * stage_s, 0.0) / 3 * np.maximum(micro_batches - 2 * behind, 0.0),
        }
        per_chunk = np.maximum((2 * delay - chunk_s) / 3, 0.0)
        per_chunk = np.maximum(per_chunk, 2 * total / stages - chunk_s / 3)  # of a round that returns to the first site
        ahead = (stages * (chunks - 1) + 2 * behind) / chunks
        excess[INTERLEAVED] = per_chunk * chunks * np.maximum(micro_batches - ahead, 0.0)
        excess[INTERLEAVED] += 4 * total * (chunks - 1)  # the first micro-batch goes there, returns, and goes again
        waits.append(_of_kind(kind, excess))
    ways = np.where((kind == ZB_H2) & (micro_batches >= 2 * stages), 1.0, 2.0)  # it has other work at the end
    return ways * total + np.maximum.reduce(waits)
