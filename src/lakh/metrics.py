"""Prometheus metrics on prometheus_client: one registry per component, its text page, and a small HTTP server for it.

    metrics = MetricsRegistry("lakh_")
    steps = metrics.counter("steps_total", "Optimizer updates.")
    metrics.collect_from(lambda: [gauge_family("lakh_queue", "Requests waiting.", len(queue))])
    server = metrics.serve(port=0)        # http://127.0.0.1:PORT/metrics until server.close()

Counters, gauges and histograms are updated where things happen; `collect_from` reads values when the page is asked for.
Families are plain picklable objects, so one process can show what another counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from lakh.errors import MissingExtra, UserError

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram
    from prometheus_client.metrics_core import Metric

__all__ = ["CONTENT_TYPE", "MetricsRegistry", "MetricsServer", "counter_family", "gauge_family"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsRegistry:
    """Metrics whose names start with `prefix`. `process` adds prometheus_client's metrics of this process."""

    def __init__(self, prefix: str = "lakh_", *, process: bool = False) -> None:
        self._prometheus = _prometheus_client()
        self._prefix = prefix
        self.registry = self._prometheus.CollectorRegistry()
        if process:
            self._prometheus.ProcessCollector(registry=self.registry)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        counter: Counter = self._prometheus.Counter(self._prefix + name, help_text, labels, registry=self.registry)
        return counter

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        gauge: Gauge = self._prometheus.Gauge(self._prefix + name, help_text, labels, registry=self.registry)
        return gauge

    def histogram(self, name: str, help_text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        full_name = self._prefix + name
        made: Histogram = self._prometheus.Histogram(
            full_name, help_text, labels, buckets=buckets, registry=self.registry
        )
        return made

    def collect_from(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add families that are read when the page is asked for."""
        self.registry.register(_FamilyReader(read))

    def families(self) -> list[Metric]:
        return list(self.registry.collect())

    def page(self) -> bytes:
        """All metrics in the text format, of type CONTENT_TYPE."""
        return bytes(self._prometheus.generate_latest(self.registry))

    def serve(self, port: int = 0, address: str = "127.0.0.1", *, setting: str = "metrics port") -> MetricsServer:
        """Answer GET /metrics from a thread. Port 0 takes a free one; `setting` names the port in errors."""
        try:
            server, thread = self._prometheus.start_http_server(port, address, registry=self.registry)
        except OSError as error:
            found = f"cannot listen on {address}:{port} ({error.strerror})"
            raise UserError(f"{setting} = {port}", found, "choose another; 0 takes a free one") from None
        return MetricsServer(server, thread)


class MetricsServer:
    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _FamilyReader:
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> list[Metric]:
        return []  # names are not known before the first read


def counter_family(name: str, help_text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """A counter that is read: one value, or a value for each value of `label`. `name` ends in _total."""
    return _family("CounterMetricFamily", name, help_text, value, label)


def gauge_family(name: str, help_text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """A gauge that is read: one value, or a value for each value of `label`."""
    return _family("GaugeMetricFamily", name, help_text, value, label)


def _family(kind: str, name: str, help_text: str, value: float | Mapping[str, float], label: str) -> Metric:
    from prometheus_client import core

    family: Metric = getattr(core, kind)(name, help_text, labels=[label] if label else None)
    values = value if isinstance(value, Mapping) else {"": value}
    for key, number in values.items():
        family.add_metric([str(key)] if label else [], number)  # type: ignore[attr-defined]
    return family


def _prometheus_client() -> Any:
    try:
        import prometheus_client  # an optional dependency
    except ModuleNotFoundError:
        raise MissingExtra("metrics", "prometheus_client", "train") from None
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return prometheus_client
