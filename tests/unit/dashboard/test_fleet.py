"""The ranks of a run: their places, the slow ones, and findings of node checks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lakh.dashboard.run_view import RunView

SETTINGS = """
[mesh]
dp_replicate = 2
dp_shard = -1
tp = 4
pp = 1
cp = 1
order = ["dp_replicate", "pp", "dp_shard", "cp", "tp"]
[[cluster.tiers]]
name = "node"
size = 8
[[cluster.tiers]]
name = "rack"
size = 32
"""


def data(run: Any) -> dict[str, Any]:
    view = RunView("run", run.run_dir)
    view.refresh()
    return view.data(run.now_s, points=50)


def start(run: Any, world: int, writers: int) -> None:
    for rank in range(writers):
        run.event("run_started", rank=rank, world=world, attempt=0, device="cuda:0", parameters=1)


def test_before_the_first_rank_there_is_no_fleet(fake_run: Any) -> None:
    assert data(fake_run)["fleet"] is None


def test_ranks_have_places_and_states(fake_run: Any) -> None:
    (fake_run.run_dir / "run.toml").write_text(SETTINGS)
    start(fake_run, world=16, writers=15)
    fake_run.event("ranks_lost", step=3, lost=[5], left=15, reason="x", seconds=1.0)
    fleet = data(fake_run)["fleet"]
    assert fleet["size"] == 16
    assert fleet["tiers"] == [{"name": "node", "size": 8}]  # one rack holds all
    assert fleet["mesh"] == [{"axis": name, "size": n} for name, n in (("dp_replicate", 2), ("dp_shard", 2), ("tp", 4))]
    assert fleet["states"] == ["started"] * 5 + ["lost"] + ["started"] * 9 + ["unknown"]


def test_the_heat_map_adds_up_the_time_that_others_waited(fake_run: Any) -> None:
    start(fake_run, world=4, writers=4)
    for step in range(1, 121):
        slow = 3 if step > 60 else 1
        fake_run.event("step_done", step=step, after_s=1.0, step_s=1.0, slowest_rank=slow, straggler_s=0.1 * slow)
    fleet = data(fake_run)["fleet"]
    assert fleet["waited_s"] == [0.0, 6.0, 0.0, 18.0]
    assert [(row["rank"], row["steps"]) for row in fleet["slowest"]] == [(3, 60), (1, 60)]
    heat = fleet["heat"]
    assert heat["ranks"] == [1, 3]
    assert len(heat["rows"][0]) == 60
    assert sum(heat["rows"][0]) == pytest.approx(6.0)
    assert heat["rows"][0][30:] == [0.0] * 30
    assert heat["rows"][1][:30] == [0.0] * 30


def test_many_ranks_share_cells(fake_run: Any) -> None:
    start(fake_run, world=100_000, writers=1)
    fake_run.event("step_done", step=1, after_s=1.0, step_s=1.0, slowest_rank=99_999, straggler_s=0.5)
    fleet = data(fake_run)["fleet"]
    assert fleet["ranks_per_cell"] == 49
    assert len(fleet["states"]) <= 2_048
    assert fleet["waited_s"][-1] == 0.5
    assert len(json.dumps(fleet)) < 60_000


def test_impossible_numbers_are_ignored(fake_run: Any) -> None:
    (fake_run.run_dir / "run.toml").write_text('[mesh]\ntp = "x"\n[cluster]\ntiers = 3\n')
    start(fake_run, world=2, writers=2)
    for slowest, waited in ((99, 1.0), (-1, 1.0), ("x", 1.0), (1, None), (1, float("nan"))):
        fake_run.event("step_done", step=1, step_s=1.0, slowest_rank=slowest, straggler_s=waited)
    fleet = data(fake_run)["fleet"]
    assert fleet["waited_s"] == [0.0, 0.0]
    assert (fleet["mesh"], fleet["tiers"]) == ([], [])
    fake_run.event("run_started", world=10**12, attempt=0, device="cpu", parameters=1)
    assert data(fake_run)["fleet"]["size"] == 2


def test_findings_of_node_checks_are_read_beside_the_runs(fake_run: Any) -> None:
    finding = {"time_s": 5.0, "node": "a", "serial": "s1", "check": "ecc", "level": "drain", "reason": "x" * 900}
    lines = ["not json", "[1]", json.dumps(finding), json.dumps({**finding, "time_s": 9.0, "node": "b"})]
    (fake_run.run_dir.parent / "health.jsonl").write_text("\n".join(lines))
    found = data(fake_run)["health"]
    assert [(row["node"], row["time_s"], len(row["reason"])) for row in found] == [("b", 9.0, 200), ("a", 5.0, 200)]
    (fake_run.run_dir / "health.jsonl").symlink_to("/etc/passwd")
    assert len(data(fake_run)["health"]) == 2
