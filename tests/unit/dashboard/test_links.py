"""The map of links between ranks: rates and wrong sums of lakh health pairs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lakh.dashboard.fleet.links import MAX_CELLS, link_map
from lakh.dashboard.run_view import RunView
from lakh.health.pairs import PairResult, find_faulty_ranks


def write(folder: Path, results: list[PairResult]) -> None:
    rows = [{"first": r.first, "second": r.second, "GBps": r.GBps, "is_right": r.is_right} for r in results]
    folder.mkdir(exist_ok=True)
    (folder / "pairs.json").write_text(json.dumps({"pairs": rows, "faulty": find_faulty_ranks(results)}))


def test_every_pair_has_a_cell_and_the_slow_rank_is_named(tmp_path: Path) -> None:
    pairs = [
        PairResult(a, b, 1.0 if b == 3 else 10.0, (a, b) != (0, 1)) for a, b in itertools.combinations(range(4), 2)
    ]
    write(tmp_path / "run", pairs)
    found = link_map(tmp_path / "run")
    assert found is not None
    assert found["GBps"] == [[None, 10, 10, 1], [10, None, 10, 1], [10, 10, None, 1], [1, 1, 1, None]]
    assert (found["wrong"], found["median_GBps"], found["pairs"]) == ([[0, 1], [1, 0]], 5.5, 6)
    assert found["slowest"][0] == {"first": 0, "second": 1, "GBps": 10.0, "is_right": False}
    assert found["slowest"][1]["second"] == 3
    assert "3" in found["faulty"]


def test_a_large_fleet_keeps_its_slowest_pair(tmp_path: Path) -> None:
    pairs = [
        PairResult(a, b, 0.5 if (a, b) == (17, 201) else 10.0, True) for a in range(200) for b in range(a + 1, 202)
    ]
    write(tmp_path, pairs)  # beside the runs
    found = link_map(tmp_path / "run")
    assert found is not None
    assert (len(found["GBps"]) <= MAX_CELLS, found["ranks_per_cell"]) == (True, 4)
    assert found["GBps"][17 // 4][201 // 4] == found["GBps"][201 // 4][17 // 4] == 0.5
    assert sum(rate == 0.5 for row in found["GBps"] for rate in row) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"pairs": 3}',
        '{"pairs": [3, {"first": "a"}, {"first": 1, "second": 1, "GBps": 1}]}',
        '{"pairs": [' * 9,
    ],
)
def test_a_malformed_file_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "pairs.json").write_text(text)
    assert link_map(tmp_path) is None


def test_hostile_rows_are_bounded(tmp_path: Path) -> None:
    good = {"first": 0, "second": 1, "GBps": 2.0, "is_right": True}
    rows: list[Any] = [good, {**good, "GBps": 1e999}, {**good, "second": 1 << 40}, {**good, "GBps": -1}]
    (tmp_path / "pairs.json").write_text(json.dumps({"pairs": rows, "faulty": {"<b>": "x" * 10_000}}))
    found = link_map(tmp_path)
    assert found is not None
    assert (found["size"], found["pairs"], len(found["faulty"]["<b>"])) == (2, 1, 200)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "pairs.json").symlink_to("/etc/passwd")
    (tmp_path / "pairs.json").unlink()
    assert link_map(tmp_path / "run") is None


def test_the_run_shows_links_and_traffic(fake_run: Any) -> None:
    write(fake_run.run_dir, [PairResult(0, 1, 3.0, True)])
    fake_run.begin()
    fake_run.event("network_traffic", step=1, sent_bytes={"node": 4_000, "rack": 9_000_000, "bad": "x"})
    view = RunView("run", fake_run.run_dir)
    view.refresh()
    shown = view.data(fake_run.now_s, points=50)
    assert shown["links"]["median_GBps"] == 3.0
    assert shown["fleet"]["sent_bytes"] == {"rack": 9_000_000, "node": 4_000}
