"""Connected components of a graph of near duplicates, without holding the graph on one machine.

Edges are tables with the columns a and b (nodes). One round is two keyed exchanges:

    large_star   for every node u and its neighbours N: join each larger neighbour to min(N and u)
    small_star   for every node u and its smaller neighbours: join those and u to the smallest of them

Once `small_star` changes nothing, every component is a star around its smallest node: rows (a, root) with root < a.
The number of rounds is logarithmic in the longest chain (Kiveris et al., "Connected Components in MapReduce and
Beyond", 2014). `components` does the same in one process. Both give the smallest node of a component as its root, which
is the copy that stays (nodes.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["EDGES", "as_array", "components", "directed", "large_star", "small_star", "sorted_codes"]

EDGES = pa.schema([("a", pa.large_string()), ("b", pa.large_string())])


def directed(edges: Any, *, both: bool) -> Any:
    """Edges as rows (key, other), to exchange by key: both ways for large_star, larger first for small_star."""
    (a, b), names = sorted_codes(edges.column("a"), edges.column("b"))
    high, low = np.maximum(a, b), np.minimum(a, b)
    keys, others = (np.concatenate([high, low]), np.concatenate([low, high])) if both else (high, low)
    return pa.table({"key": names.take(pa.array(keys)), "other": names.take(pa.array(others))})


def large_star(rows: Any) -> Any:
    """EDGES from rows (key, other), with all rows of each key and both directions."""
    (keys, others), names = sorted_codes(rows.column("key"), rows.column("other"))
    smallest = _smallest_with_self(keys, others, len(names))
    larger = others > keys
    return _edges(names, others[larger], smallest[keys[larger]])


def small_star(rows: Any) -> Any:
    """EDGES from rows (key, other) with other < key and all rows of each key."""
    (keys, others), names = sorted_codes(rows.column("key"), rows.column("other"))
    smallest = _smallest_with_self(keys, others, len(names))
    distinct = np.unique(keys)
    return _edges(names, np.concatenate([others, distinct]), smallest[np.concatenate([keys, distinct])])


def components(edges: Any) -> Any:
    """(node, root) of every node that has an edge; the root is the smallest node of its component."""
    (a, b), names = sorted_codes(edges.column("a"), edges.column("b"))
    parent = np.arange(len(names))
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        x, y = _root(parent, x), _root(parent, y)
        parent[max(x, y)] = min(x, y)
    roots = np.array([_root(parent, node) for node in range(len(parent))], np.int64)
    return pa.table({"node": names, "root": names.take(pa.array(roots))})


def sorted_codes(*columns: Any) -> tuple[list[np.ndarray], Any]:
    """String columns as numbers in the order of the strings, and the sorted distinct strings."""
    arrays = [as_array(column) for column in columns]
    encoded = pa.concat_arrays(arrays).dictionary_encode()
    order = np.asarray(pc.sort_indices(encoded.dictionary))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    codes = rank[np.asarray(encoded.indices)]
    ends = np.cumsum([len(array) for array in arrays])
    return np.split(codes, ends[:-1]), encoded.dictionary.take(pa.array(order))


def as_array(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _smallest_with_self(keys: np.ndarray, others: np.ndarray, count: int) -> np.ndarray:
    smallest = np.arange(count)
    np.minimum.at(smallest, keys, others)
    return smallest


def _edges(names: Any, a: np.ndarray, b: np.ndarray) -> Any:
    """Distinct edges without loops, sorted, so that the order of the input rows does not matter."""
    a, b = a[a != b], b[a != b]
    pairs = np.unique(np.stack([a, b], axis=1), axis=0) if len(a) else np.empty((0, 2), np.int64)
    return pa.table({"a": names.take(pa.array(pairs[:, 0])), "b": names.take(pa.array(pairs[:, 1]))})


def _root(parent: np.ndarray, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = int(parent[node])
    return node
