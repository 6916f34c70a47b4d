"""What the agent tells others: an event when the decision changes, and Prometheus metrics of every check."""

from __future__ import annotations

from collections.abc import Sequence

from lakh.events import EventLog, NodeChecked
from lakh.health.decisions import HealthDecision, HealthFinding, Word
from lakh.metrics import MetricsRegistry

__all__ = ["HealthReport"]

LEVELS: dict[Word, int] = {"healthy": 0, "watch": 1, "drain": 2, "rma": 3}


class HealthReport:
    """`with HealthReport(node, events="health", port=9400) as report: report.update(findings, decision)`."""

    def __init__(self, node: str, *, events: str | None = None, port: int | None = None) -> None:
        """`events`: folder for the events; `port`: of the metrics page (0: any free one). None writes neither."""
        self._node, self._last = node, ""
        self._log = EventLog(events) if events is not None else None
        self._server = None
        if port is not None:
            metrics = MetricsRegistry("lakh_node_")
            labels = ("node", "check", "device")
            self._failed = metrics.gauge("check_failed", "1 if a health check found something.", labels)
            self._value = metrics.gauge("check_value", "What a health check compared with its limit.", labels)
            self._decision = metrics.gauge("decision", "0 healthy, 1 watch, 2 drain, 3 rma.", ("node",))
            self._rounds = metrics.counter("checks_total", "Rounds of all checks.", ("node",))
            self._server = metrics.serve(port, "0.0.0.0", setting="--prometheus-port")

    @property
    def port(self) -> int | None:
        """Of the metrics page."""
        return self._server.port if self._server is not None else None

    def __enter__(self) -> HealthReport:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
        if self._server is not None:
            self._server.close()

    def update(self, findings: Sequence[HealthFinding], decision: HealthDecision) -> None:
        """Report one round of checks."""
        if self._log is not None and decision.word != self._last:
            self._log.write(NodeChecked(node=self._node, decision=decision.word, reason=decision.reason))
        self._last = decision.word
        if self._server is None:
            return
        for finding in findings:
            labels = (self._node, finding.check, finding.device)
            self._failed.labels(*labels).set(not finding.ok)
            self._value.labels(*labels).set(finding.value)
        self._decision.labels(self._node).set(LEVELS[decision.word])
        self._rounds.labels(self._node).inc()
