"""Rates of all flows at once: max-min fair, or with the back-pressure of priority flow control (PFC).

Progressive filling: the link with the smallest fair share binds, its flows stop growing there, and the share of every
other link can only rise. So a heap of lower bounds suffices: a link is checked again when it is popped, not whenever a
flow on it stops. Cost: O(links of all flows + pops x log(links)).

PFC pauses ports, not flows: once a link binds, every flow that shares an earlier link with one of its flows waits too,
and so do the flows behind those. Rates with PFC are therefore never higher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lakh.planner.compiled import compiled
from lakh.planner.fabric.topology import Floats

__all__ = ["flow_rates"]


def flow_rates(links: NDArray[np.int32], capacity: Floats, *, pfc: bool = False) -> tuple[Floats, NDArray[np.int32]]:
    """Bytes per second of each flow, and the link that binds it. A flow over a dead link has rate 0."""
    rates, binding = _fill(links, capacity, pfc)
    return rates, binding


@compiled
def _fill(links: NDArray[np.int32], capacity: Floats, pfc: bool) -> tuple[Floats, NDArray[np.int32]]:
    num_flows, hops = links.shape
    num_links = len(capacity)
    # Flows of each link, as one array with a start per link.
    start = np.zeros(num_links + 1, dtype=np.int64)
    for flow in range(num_flows):
        for hop in range(hops):
            if links[flow, hop] >= 0:
                start[links[flow, hop] + 1] += 1
    for link in range(num_links):
        start[link + 1] += start[link]
    active = np.empty(num_links, dtype=np.int64)  # flows of a link that still grow
    for link in range(num_links):
        active[link] = start[link + 1] - start[link]
    at = start[:-1].copy()
    flows_of = np.empty(start[-1], dtype=np.int32)
    for flow in range(num_flows):
        for hop in range(hops):
            link = links[flow, hop]
            if link >= 0:
                flows_of[at[link]] = flow
                at[link] += 1

    rates = np.zeros(num_flows)
    binding = np.full(num_flows, -1, dtype=np.int32)
    is_frozen = np.zeros(num_flows, dtype=np.bool_)
    left = capacity.copy()
    is_paused = np.zeros(num_links, dtype=np.bool_)
    paused = np.empty(num_links, dtype=np.int32)

    # Binary heap of links by a lower bound of their share.
    heap = np.empty(num_links, dtype=np.int32)
    key = np.empty(num_links)
    size = 0
    for link in range(num_links):
        if active[link] > 0:
            heap[size] = link
            key[size] = left[link] / active[link]
            size += 1
    for root in range(size // 2 - 1, -1, -1):
        _sift_down(heap, key, root, size)

    while size > 0:
        bound = heap[0]
        share = max(left[bound], 0.0) / active[bound] if active[bound] > 0 else np.inf
        if active[bound] == 0:
            size -= 1
            heap[0], key[0] = heap[size], key[size]
            _sift_down(heap, key, 0, size)
            continue
        if share > key[0] * (1 + 1e-12):
            key[0] = share
            _sift_down(heap, key, 0, size)
            continue
        # The link binds, and with PFC all links behind it.
        num_paused = 1
        paused[0] = bound
        is_paused[bound] = True
        while num_paused > 0:
            num_paused -= 1
            link = paused[num_paused]
            for i in range(start[link], start[link + 1]):
                flow = flows_of[i]
                if is_frozen[flow]:
                    continue
                is_frozen[flow] = True
                rates[flow] = share
                binding[flow] = bound
                is_earlier = True
                for hop in range(hops):
                    other = links[flow, hop]
                    if other < 0:
                        continue
                    left[other] -= share
                    active[other] -= 1
                    if other == link:
                        is_earlier = False
                    elif pfc and is_earlier and not is_paused[other]:
                        is_paused[other] = True
                        paused[num_paused] = other
                        num_paused += 1
    return rates, binding


@compiled
def _sift_down(heap: NDArray[np.int32], key: Floats, root: int, size: int) -> None:
    item, value = heap[root], key[root]
    while True:
        child = 2 * root + 1
        if child >= size:
            break
        if child + 1 < size and key[child + 1] < key[child]:
            child += 1
        if key[child] >= value:
            break
        heap[root], key[root] = heap[child], key[child]
        root = child
    heap[root], key[root] = item, value
