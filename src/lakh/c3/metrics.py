"""A Prometheus endpoint for one rank, and finding the slowest rank from waiting times.

`serve_metrics(group)` serves GET /metrics from a thread. The native core's counters are read when the page is
requested; otherwise it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lakh.c3.group import CommGroup
from lakh.metrics import MetricsRegistry, MetricsServer

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["find_slowest_rank", "serve_metrics"]


def serve_metrics(group: CommGroup, port: int = 0, address: str = "127.0.0.1") -> MetricsServer:
    """Serve a group's counters until `close()` of the returned server. Port 0 takes a free one."""
    metrics = MetricsRegistry("lakh_c3_")
    metrics.collect_from(lambda: _read_families(group))
    return metrics.serve(port, address)


def _read_families(group: CommGroup) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    rank = str(group.rank)

    def family(kind: Any, name: str, help_text: str, values: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        made = kind(f"lakh_c3_{name}", help_text, labels=["rank", *values[0][0]])
        for labels, value in values:
            made.add_metric([rank, *labels.values()], value)
        return cast("Metric", made)

    host, rack, zone = group.topology.places[group.rank]
    node = group.numa_nodes[group.rank]
    place = {"host": host, "rack": rack, "zone": zone, "numa": "" if node is None else str(node)}
    waited = [({"peer": str(peer)}, waited_us) for peer, waited_us in enumerate(group.waited_us())]
    counters = [
        family(
            CounterMetricFamily, f"{name.replace('_us', '_microseconds')}_total", f"c3 counter {name}.", [({}, value)]
        )
        for name, value in group.counters().items()
    ]
    return [
        *counters,
        family(
            CounterMetricFamily, "waited_for_microseconds_total", "Time this rank has waited for each peer.", waited
        ),
        family(GaugeMetricFamily, "place_info", "Location of this rank.", [(place, 1)]),
        family(GaugeMetricFamily, "up", "1 while the group is usable.", [({}, 0 if group.failure() else 1)]),
    ]


def find_slowest_rank(waited_us: Sequence[Sequence[int]], least_us: int = 1000) -> tuple[int | None, str]:
    """The rank that delays the others: `waited_us[a][b]` is how long rank a waited for rank b.

    The others wait for the slowest rank, which waits little itself; a rank that does both only passes on a delay.
    """
    size = len(waited_us)
    caused = [sum(waited_us[a][b] for a in range(size) if a != b) for b in range(size)]
    spent = [sum(waited_us[a]) for a in range(size)]
    blame = [caused[rank] / max(1, size - 1) - spent[rank] for rank in range(size)]
    worst = max(range(size), key=lambda rank: blame[rank])
    if size < 2 or blame[worst] < least_us:
        return None, "no rank is waited for noticeably longer than it waits"
    per_peer_s = caused[worst] / (size - 1) * 1e-6
    reason = f"rank {worst}: each other rank waited {per_peer_s:.3g} s for it, it waited {spent[worst] * 1e-6:.3g} s"
    return worst, reason
