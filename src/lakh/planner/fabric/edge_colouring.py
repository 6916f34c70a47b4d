"""Conflict-free paths on a two-stage Clos: a colouring of the flows between leaves, where the colour is the spine.

Koenig: a bipartite multigraph of maximum degree D has an edge colouring with D colours. So as long as no leaf sends or
receives more flows than it has uplinks, every flow has an uplink and a downlink to itself. Flows are coloured one
after another; where no colour is free at both ends, an alternating path of two colours is swapped. Cost O(E x V) at
worst, and nearly linear on traffic of collectives.
"""

from __future__ import annotations

import numpy as np

from lakh.planner.compiled import compiled
from lakh.planner.fabric.topology import Ints

__all__ = ["colour_edges"]


def colour_edges(left: Ints, right: Ints) -> tuple[Ints, int]:
    """A colour for each edge between a left and a right vertex, and the number of colours: the largest degree."""
    if len(left) == 0:
        return np.zeros(0, dtype=np.int64), 0
    degree = max(int(np.bincount(left).max()), int(np.bincount(right).max()))
    _, u = np.unique(left, return_inverse=True)
    _, v = np.unique(right, return_inverse=True)
    return _colour(u.astype(np.int64), v.astype(np.int64), int(u.max()) + 1, int(v.max()) + 1, degree), degree


@compiled
def _colour(u: Ints, v: Ints, num_left: int, num_right: int, colours: int) -> Ints:
    # Edge of each colour at each vertex; left vertices first. -1 is free.
    edge_at = np.full((num_left + num_right, colours), -1, dtype=np.int32)
    first_free = np.zeros(num_left + num_right, dtype=np.int32)
    colour_of = np.empty(len(u), dtype=np.int64)
    chain = np.empty(num_left + num_right + 1, dtype=np.int32)
    for edge in range(len(u)):
        a, b = u[edge], num_left + v[edge]
        while edge_at[a, first_free[a]] >= 0:
            first_free[a] += 1
        while edge_at[b, first_free[b]] >= 0:
            first_free[b] += 1
        free_a, free_b = first_free[a], first_free[b]
        chosen = free_a
        if edge_at[b, free_a] >= 0:
            # Swap the two colours along the path from b that begins with free_a; it cannot reach a, which has no
            # edge of free_a.
            length, vertex, colour = 0, b, free_a
            while edge_at[vertex, colour] >= 0:
                other = edge_at[vertex, colour]
                chain[length] = other
                length += 1
                vertex = num_left + v[other] if vertex == u[other] else u[other]
                colour = free_a + free_b - colour
            for i in range(length):
                other = chain[i]
                old = colour_of[other]
                for end in (u[other], num_left + v[other]):
                    if edge_at[end, old] == other:
                        edge_at[end, old] = -1
            for i in range(length):
                other = chain[i]
                new = free_a + free_b - colour_of[other]
                colour_of[other] = new
                edge_at[u[other], new] = other
                edge_at[num_left + v[other], new] = other
                for end in (u[other], num_left + v[other]):
                    first_free[end] = 0
            first_free[a] = 0
            first_free[b] = 0
        colour_of[edge] = chosen
        edge_at[a, chosen] = edge
        edge_at[b, chosen] = edge
    return colour_of
