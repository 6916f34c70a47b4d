"""lakh bench rolling-update: latencies by second, and what an update does to them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bench.serve.rolling_update import rows_over_time, save_checkpoint, slowest_stretch_s, summary_of, updating

from lakh import checkpoint
from lakh.errors import UserError
from lakh.server.loadgen.report import LoadReport

WAIT_S = 60.0


def report_of(latencies_s: dict[int, float]) -> LoadReport:
    """Two requests in each second."""
    report = LoadReport(sent=2 * len(latencies_s))
    report.latencies = [
        (second + part, 0.01, latency_s) for second, latency_s in latencies_s.items() for part in (0.2, 0.7)
    ]
    report.ends["completed"] = 2 * len(latencies_s)
    return report


def test_the_seconds_of_an_update_are_compared_with_the_others() -> None:
    report = report_of(dict.fromkeys(range(12), 0.1) | {5: 0.15, 6: 0.5, 7: 0.4, 11: 0.9})
    report.ends["timeouts"] = 1
    rows = rows_over_time(report, [5.2], 3.0)
    assert [row["second"] for row in rows if row["update"]] == [5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0]
    assert slowest_stretch_s(rows, 200) == 2  # second 11 is no update's
    found = summary_of(report, rows, 1, swaps=1)
    assert found["p99_ms"] == pytest.approx(100)
    assert found["update_p99_ms"] == pytest.approx(500)
    assert (found["failed"], found["seconds_above_double"], found["completed"]) == (1, 2, 24)
    with pytest.raises(UserError, match="measure longer"):
        summary_of(report, rows_over_time(report, [], 3.0), 0, swaps=0)


def test_checkpoints_appear_while_the_load_runs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1)
    first = checkpoint.find(tmp_path)
    until_s = time.monotonic() + WAIT_S
    with updating(tmp_path, [0.0, 0.01]) as done:
        while len(done) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
    assert len(done) == 2
    assert checkpoint.find(tmp_path) != first
    with updating(tmp_path / "waits", [WAIT_S]) as done:
        pass  # leaving ends the wait
    assert done == []
    assert not (tmp_path / "waits" / "checkpoints").exists()
