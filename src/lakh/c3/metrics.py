"""A Prometheus endpoint for one rank, and who keeps whom waiting.

`serve_metrics(group)` answers GET /metrics on a port of its own (0: any free one) from a thread; it reads the native
core's counters when asked and costs nothing otherwise. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lakh.c3.group import CommGroup

__all__ = ["find_slowest_rank", "serve_metrics", "text_of"]


def text_of(group: CommGroup) -> str:
    """The counters of a group in Prometheus' text format."""
    lines = []
    for name, value in group.counters().items():
        unit = name.replace("_us", "_microseconds")
        lines += [f"# TYPE lakh_c3_{unit}_total counter", f'lakh_c3_{unit}_total{{rank="{group.rank}"}} {value}']
    lines.append("# TYPE lakh_c3_waited_for_microseconds_total counter")
    for peer, waited_us in enumerate(group.waited_us()):
        labels = f'rank="{group.rank}",peer="{peer}"'
        lines.append(f"lakh_c3_waited_for_microseconds_total{{{labels}}} {waited_us}")
    host, rack, zone = group.topology.places[group.rank]
    node = group.numa_nodes[group.rank]
    named = {"host": host, "rack": rack, "zone": zone, "numa": "" if node is None else str(node)}
    place = ",".join([f'rank="{group.rank}"', *(f'{name}="{_escaped(value)}"' for name, value in named.items())])
    lines += ["# TYPE lakh_c3_place_info gauge", f"lakh_c3_place_info{{{place}}} 1"]
    over = group.failure()
    lines += ["# TYPE lakh_c3_up gauge", f'lakh_c3_up{{rank="{group.rank}"}} {0 if over else 1}']
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    """As a label's value may stand in the text format; labels come from whoever runs the cluster."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def serve_metrics(group: CommGroup, port: int = 0, address: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Serve in a thread until `shutdown()` of the returned server; `server_port` is its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = text_of(group).encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Do not log scrapes."""

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="c3 metrics", daemon=True).start()
    return server


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
