"""The synthetic run of `lakh bench dashboard` reads as a run, and the measurement runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="pip install aiohttp to run this")

from bench.dashboard.command import bench_dashboard
from bench.dashboard.synthetic_events import write_run

from lakh.dashboard.run_view import RunView


def test_the_synthetic_run_has_its_steps_ranks_and_failures(tmp_path: Path) -> None:
    size = write_run(tmp_path / "run", steps=3_000, ranks=4)
    assert write_run(tmp_path / "again", steps=3_000, ranks=4) == size
    view = RunView("run", tmp_path / "run")
    while view.refresh():
        pass
    shown = view.data(0.0, points=100)
    assert (shown["step"], shown["state"]["word"], shown["facts"]["ranks"]) == (3_000, "done", 4)
    assert shown["fleet"]["states"] == ["started"] * 4
    assert shown["read"]["unreadable_lines"] == 0
    measured = bench_dashboard(tmp_path / "run")
    assert set(measured) == {"open_s", "open_cpu_s", "page_kB", "read_s", "memory_MB"}
