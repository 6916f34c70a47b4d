"""The agent reports decisions as events and checks as Prometheus metrics."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from lakh import events
from lakh.health.checks import HealthReading
from lakh.health.decisions import decide_health, evaluate_checks
from lakh.health.report import HealthReport


def test_changed_decisions_are_events_and_checks_are_metrics(tmp_path: Path) -> None:
    rounds = [[HealthReading("gpu0", "s0", "ecc_uncorrectable", errors)] for errors in (0.0, 0.0, 1.0, 1.0)]
    with HealthReport("n1", events=str(tmp_path), port=0) as report:
        for readings in rounds:
            findings = evaluate_checks(readings)
            report.update(findings, decide_health(findings))
        with urllib.request.urlopen(f"http://127.0.0.1:{report.port}/metrics", timeout=10) as page:
            text = page.read().decode()
    assert 'lakh_node_check_failed{check="ecc-uncorrectable",device="gpu0",node="n1"} 1.0' in text
    assert 'lakh_node_decision{node="n1"} 2.0' in text
    assert 'lakh_node_checks_total{node="n1"} 4.0' in text
    assert [event.decision for event in events.read(tmp_path)] == ["healthy", "drain"]
