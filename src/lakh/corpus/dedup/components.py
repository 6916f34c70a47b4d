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

__all__ = ["EDGES", "as_array", "components", "directed", "large_star", "small_star"]

EDGES = pa.schema([("a", pa.string()), ("b", pa.string())])


def directed(edges: Any, *, both: bool) -> Any:
    """Edges as rows (key, other), to exchange by key: both ways for large_star, larger first for small_star."""
    a, b = _codes(edges)
    high, low = np.maximum(a.codes, b.codes), np.minimum(a.codes, b.codes)
    keys, others = (np.concatenate([high, low]), np.concatenate([low, high])) if both else (high, low)
    return pa.table({"key": a.take(keys), "other": a.take(others)})


def large_star(rows: Any) -> Any:
    """EDGES from rows (key, other), with all rows of each key and both directions."""
    keys, others = _codes(rows, ("key", "other"))
    if not len(keys.codes):
        return EDGES.empty_table()
    smallest = _smallest_with_self(keys.codes, others.codes, len(keys.names))
    larger = others.codes > keys.codes
    return _edges(keys, others.codes[larger], smallest[keys.codes[larger]])


def small_star(rows: Any) -> Any:
    """EDGES from rows (key, other) with other < key and all rows of each key."""
    keys, others = _codes(rows, ("key", "other"))
    if not len(keys.codes):
        return EDGES.empty_table()
    smallest = _smallest_with_self(keys.codes, others.codes, len(keys.names))
    a = np.concatenate([others.codes, np.unique(keys.codes)])
    b = np.concatenate([smallest[keys.codes], smallest[np.unique(keys.codes)]])
    return _edges(keys, a, b)


def components(edges: Any) -> Any:
    """(node, root) of every node that has an edge; the root is the smallest node of its component."""
    a, b = _codes(edges)
    parent = np.arange(len(a.names))
    for x, y in zip(a.codes.tolist(), b.codes.tolist(), strict=True):
        x, y = _root(parent, x), _root(parent, y)
        parent[max(x, y)] = min(x, y)
    nodes = np.arange(len(parent))
    roots = np.array([_root(parent, int(node)) for node in nodes], np.int64)
    return pa.table({"node": a.take(nodes), "root": a.take(roots)})


class _CodedColumn:
    """A string column as numbers in the same order."""

    def __init__(self, codes: np.ndarray, names: Any) -> None:
        self.codes, self.names = codes, names

    def take(self, codes: np.ndarray) -> Any:
        return self.names.take(pa.array(codes, pa.int64()))


def _codes(table: Any, columns: tuple[str, str] = ("a", "b")) -> tuple[_CodedColumn, _CodedColumn]:
    first, second = (as_array(table.column(name)) for name in columns)
    both = pa.concat_arrays([first, second]).dictionary_encode()
    names = both.dictionary
    order = names.take(pc.sort_indices(names)) if len(names) else names
    rank = np.empty(len(names), np.int64)
    if len(names):
        rank[np.asarray(pc.sort_indices(names))] = np.arange(len(names))
    codes = rank[np.asarray(both.indices)] if len(both) else np.empty(0, np.int64)
    return _CodedColumn(codes[: len(first)], order), _CodedColumn(codes[len(first) :], order)


def as_array(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _smallest_with_self(keys: np.ndarray, others: np.ndarray, count: int) -> np.ndarray:
    smallest = np.arange(count)
    np.minimum.at(smallest, keys, others)
    return smallest


def _edges(coded: _CodedColumn, a: np.ndarray, b: np.ndarray) -> Any:
    """Distinct edges without loops, sorted, so that the order of the input rows does not matter."""
    a, b = a[a != b], b[a != b]
    pairs = np.unique(np.stack([a, b], axis=1), axis=0) if len(a) else np.empty((0, 2), np.int64)
    return pa.table({"a": coded.take(pairs[:, 0]), "b": coded.take(pairs[:, 1])})


def _root(parent: np.ndarray, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = int(parent[node])
    return node
