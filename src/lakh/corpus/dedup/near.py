"""Near duplicates: texts whose sets of word 5-grams are almost equal (Jaccard similarity >= threshold).

Three pure functions over Arrow tables, with an exchange between them:

    band_rows         (node, bands)               -> (key, node), one row per band       exchange by key
    candidate_pairs   (key, node), whole keys     -> (a, b), a < b, distinct             join the two sketches
    verify_pairs      (a, b, sketch_a, sketch_b)  -> (a, b) of near duplicates           components.py

The bands fit the threshold (minhash.fit_bands). At 0.8 there are 16 bands of 8 MinHashes: a pair of similarity s shares
one with probability 1 - (1 - s^8)^16, that is 0.95 at 0.80, 0.994 at 0.85, 0.9999 at 0.90 (and 0.06 at 0.50, which
`verify_pairs` removes). At 0.6 there are 35 bands of 5, at 0.5 there are 44 of 4.
The sketch is the 1,024 smallest shingle hashes. For texts of up to 1,024 distinct shingles it is the whole set and
the similarity is exact; beyond that the standard error is at most 0.013 at 0.8.

A key with more than MAX_PAIRED nodes (licence headers, generated files) is not paired all against all: each node is
paired with the smallest one and with its next PAIRED_AHEAD neighbours in order, which keeps the cost linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakh.compiled import compiled
from lakh.corpus.dedup.components import EDGES, as_array, sorted_codes
from lakh.corpus.dedup.minhash import SKETCH
from lakh.errors import ConfigError

__all__ = ["NearDedupSettings", "band_rows", "candidate_pairs", "jaccard", "verify_pairs"]

MAX_PAIRED = 32
PAIRED_AHEAD = 8

BAND_ROWS = pa.schema([("key", pa.int64()), ("node", pa.large_string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class NearDedupSettings:
    """Near deduplication."""

    enabled: bool = True
    """Whether to search for near duplicates."""
    threshold: float = 0.8
    """Texts whose sets of shingles have at least this Jaccard similarity count as one. A lower value finds copies with
    more changes, and costs more comparisons."""
    ignore_names: bool = False
    """Compare texts without their names, so that a copy with renamed variables is found: a shingle is then a run of 16
    tokens in which names count only by their repetitions, instead of 5 words."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.threshold <= 1:
            raise ConfigError("threshold", f"{self.threshold} is out of range", "choose a value from 0.5 to 1")


def band_rows(table: Any) -> Any:
    """BAND_ROWS of (node, bands); texts without bands (dropped, too short) give no rows."""
    nodes, bands = as_array(table.column("node")), as_array(table.column("bands"))
    keys = np.frombuffer(b"".join(bands.to_pylist()), np.int64)
    num_bands = np.asarray(pc.divide(pc.binary_length(bands), 8))
    repeated = nodes.take(pa.array(np.repeat(np.arange(len(nodes)), num_bands)))
    return pa.table({"key": pa.array(keys), "node": repeated}, schema=BAND_ROWS)


def candidate_pairs(table: Any) -> Any:
    """Pairs of nodes that share a key, from BAND_ROWS with all rows of each key."""
    (nodes,), names = sorted_codes(table.column("node"))
    if not len(names):
        return EDGES.empty_table()
    made = np.unique(_pair_up(np.asarray(as_array(table.column("key"))), nodes), axis=0)
    return pa.table({"a": names.take(pa.array(made[:, 0])), "b": names.take(pa.array(made[:, 1]))}, schema=EDGES)


def verify_pairs(table: Any, settings: NearDedupSettings) -> Any:
    """(a, b) of the rows of (a, b, sketch_a, sketch_b) that are near duplicates."""
    left, right = table.column("sketch_a").to_pylist(), table.column("sketch_b").to_pylist()
    values = np.array([jaccard(a, b) for a, b in zip(left, right, strict=True)], np.float64)
    return table.select(["a", "b"]).filter(pa.array(values >= settings.threshold))


def jaccard(left: bytes, right: bytes) -> float:
    """Similarity of two sketches: exact if both have fewer than SKETCH values, else an estimate from the smallest."""
    return float(_jaccard(np.frombuffer(left, np.uint32), np.frombuffer(right, np.uint32)))


@compiled
def _jaccard(a: Any, b: Any) -> float:
    i = j = union = common = 0
    full = len(a) == SKETCH or len(b) == SKETCH
    while (i < len(a) or j < len(b)) and not (full and union == SKETCH):
        union += 1
        if j >= len(b) or (i < len(a) and a[i] < b[j]):
            if j >= len(b) and len(b) == SKETCH:  # beyond b's sketch
                return common / (union - 1) if union > 1 else 0.0
            i += 1
        elif i >= len(a) or b[j] < a[i]:
            if i >= len(a) and len(a) == SKETCH:
                return common / (union - 1) if union > 1 else 0.0
            j += 1
        else:
            common += 1
            i += 1
            j += 1
    return common / union if union else 0.0


def _pair_up(keys: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    order = np.lexsort((nodes, keys))
    keys, nodes = keys[order], nodes[order]
    fresh = np.ones(len(keys), bool)
    fresh[1:] = (keys[1:] != keys[:-1]) | (nodes[1:] != nodes[:-1])
    keys, nodes = keys[fresh], nodes[fresh]
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    sizes = np.diff(np.r_[starts, len(keys)])
    first = np.repeat(starts, sizes)  # per row, the start of its key
    last = first + np.repeat(sizes, sizes)
    small = np.repeat(sizes, sizes) <= MAX_PAIRED
    rows = np.arange(len(keys))
    found = []
    for ahead in range(1, MAX_PAIRED):
        within = rows[(rows + ahead < last) & (small | (ahead <= PAIRED_AHEAD))]
        if not len(within):
            break
        found.append(np.stack([nodes[within], nodes[within + ahead]], axis=1))
    crowded = rows[~small & (rows > first)]
    found.append(np.stack([nodes[first[crowded]], nodes[crowded]], axis=1))
    return np.concatenate(found) if found else np.empty((0, 2), np.int64)
