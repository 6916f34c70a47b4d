"""Cost of starting a process group: measured coefficients for planning.

Measured with `bench/comm/startup.py` (8 to 512 ranks as threads of one process, each pretending to be on its own host,
2 cores of a Neoverse-N1, 2026-11-15): the CPU time of one rank from the rendezvous to the end of the first barrier.
Round trips to the rendezvous store do not show in one process; they are counted instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["STARTUP", "Startup"]


@dataclass(frozen=True)
class Startup:
    """Of one library. Every rank learns the addresses of all others, so its cost grows with their number."""

    base_ms: float
    per_peer_ms: float
    requests_per_rank: float
    """Requests to the rendezvous store; 0 where they were not counted."""
    is_full_mesh: bool
    """Whether every rank connects to all others at start; otherwise to log2 of them at the first barrier."""

    def rank_cpu_s(self, ranks: int) -> float:
        """CPU seconds of one rank; within a third of the measured points."""
        return (self.base_ms + self.per_peer_ms * (ranks - 1)) / 1e3

    def rank_wall_s(self, ranks: int, store_round_trip_s: float) -> float:
        """Seconds until one rank is ready, if each rank has its own core and the store is not the bottleneck."""
        return self.rank_cpu_s(ranks) + self.requests_per_rank * store_round_trip_s

    def connections(self, ranks: int) -> float:
        """Connections of one rank after its first barrier."""
        return ranks - 1 if self.is_full_mesh else 2 * math.ceil(math.log2(max(1, ranks)))


STARTUP = {
    # CPU ms per rank at 8, 32, 64, 128, 256, 512 ranks: 1.6, 1.9, 2.5, 3.6, 7.4, 16.8
    "c3": Startup(base_ms=1.3, per_peer_ms=0.027, requests_per_rank=7.0, is_full_mesh=False),
    # 2.0, 3.4, 6.1, 13.6; its full mesh was not measured beyond 128 ranks
    "gloo": Startup(base_ms=1.2, per_peer_ms=0.088, requests_per_rank=0.0, is_full_mesh=True),
}
