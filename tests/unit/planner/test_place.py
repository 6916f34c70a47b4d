"""Placement of a job: the cut is exact, no baseline has a smaller one, and the rank file is what torchrun gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lakh.errors import DataError, InfeasiblePlan, UserError
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.placement.free_nodes import fragmented, read_hosts
from lakh.planner.placement.job_grid import JobGrid, job_grid
from lakh.planner.placement.minimum_cut import counts_cost, greedy_counts, minimum_cut_counts
from lakh.planner.placement.place_job import STRATEGIES, compare_placements
from lakh.spec.cluster import load_cluster
from lakh.trainer.launch.rank_file import node_rank, rank_file_text, read_rank_file
from lakh.trainer.torchrun import with_rank_file

ROCE = load_cluster("llama3-24k-roce")
HALF = replace(ROCE, tiers=(*ROCE.tiers[:-1], replace(ROCE.tiers[-1], size=12288)))
"""Four zones: the solver is quick."""
MODEL = load_model("llama3-70b")
Json = Callable[[str], dict[str, Any]]
Lakh = Callable[..., tuple[int, str, str]]


def plan(gpus: int = 6144, tp: int = 8, pp: int = 8) -> ExecutionPlan:
    return ExecutionPlan.of(
        gpus=gpus, sequence=8192, batch=gpus // (tp * pp) * 8, tp=tp, pp=pp, zero=1, gradient_bytes=4
    )


def test_the_cut_counts_rings_and_sends() -> None:
    grid = JobGrid(stages=3, width=4, ring_bytes=10.0, send_bytes=1.0)
    whole_stages = np.array([[0] * 4, [0] * 4, [1] * 4])
    assert grid.cut_bytes(whole_stages) == 4
    columns = np.array([[0, 0, 1, 1]] * 3)
    assert grid.cut_bytes(columns) == 3 * 2 * 10
    assert grid.cut_bytes(np.zeros((3, 4), dtype=np.int64)) == 0


def every_count(stage_nodes: list[int], room: list[int]) -> list[np.ndarray]:
    rows = [[c for c in itertools.product(*(range(r + 1) for r in room)) if sum(c) == n] for n in stage_nodes]
    return [np.array(one) for one in itertools.product(*rows) if (np.array(one).sum(axis=0) <= room).all()]


@pytest.mark.parametrize("ring", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("room", [[4, 4, 4], [6, 3, 3], [5, 5, 2], [2, 2, 8]])
def test_small_problems_are_solved_exactly(ring: float, room: list[int]) -> None:
    stages = [4, 4, 3]
    best = min(counts_cost(counts, ring, 1.0) for counts in every_count(stages, room))
    found = minimum_cut_counts(np.array(stages), np.array(room), ring, 1.0)
    assert (found.sum(axis=1) == stages).all()
    assert (found.sum(axis=0) <= room).all()
    assert counts_cost(found, ring, 1.0) == pytest.approx(best)
    assert counts_cost(greedy_counts(np.array(stages), np.array(room), ring, 1.0), ring, 1.0) >= best


def test_too_few_nodes_are_infeasible() -> None:
    with pytest.raises(InfeasiblePlan, match="12 nodes are needed, 8 are free"):
        minimum_cut_counts(np.array([6, 6]), np.array([4, 4]), 1.0, 1.0)
    with pytest.raises(InfeasiblePlan, match="needs 768 nodes"):
        compare_placements(MODEL, plan(), ROCE, np.arange(100))
    with pytest.raises(InfeasiblePlan, match="whole nodes"):
        job_grid(MODEL, plan(gpus=32, tp=4, pp=8), 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "busy", "seed"), [(8, 8, 0.0, 1), (8, 8, 0.3, 1), (4, 8, 0.45, 3), (8, 1, 0.4, 2)]
)
def test_no_baseline_has_a_smaller_cut(tp: int, pp: int, busy: float, seed: int) -> None:
    free = fragmented(HALF, busy, seed).numbers
    found = compare_placements(MODEL, plan(tp=tp, pp=pp), HALF, free, seed=seed)
    assert set(found.baselines) | {"minimum-cut"} == set(STRATEGIES)
    used = found.best.nodes.ravel()
    assert len(np.unique(used)) == len(used) == 768
    assert np.isin(used, free).all()
    for other in found.baselines.values():
        assert found.cut <= other.cuts[found.tier] * (1 + 1e-9)
    assert found.baselines["random"].step_s > found.best.step_s
    assert found.best.step_s <= found.baselines["packed"].step_s * 1.01  # fewer bytes in all, not on every link


def test_a_job_that_fits_into_a_zone_stays_there() -> None:
    found = compare_placements(MODEL, plan(gpus=2048), ROCE, fragmented(ROCE, 0.2, 1).numbers)
    assert found.cut == 0
    assert len(np.unique(found.best.nodes // 384)) == 1


def test_a_hosts_file_says_what_is_free(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("".join(f"h{n}{' busy' if n % 2 else ''}\n" for n in range(3072)))
    free = read_hosts(path, ROCE)
    assert free.numbers[:3].tolist() == [0, 2, 4]
    path.write_text("one\n")
    with pytest.raises(DataError, match="3072 nodes"):
        read_hosts(path, ROCE)
    with pytest.raises(UserError, match="cannot be read"):
        read_hosts(tmp_path / "none", ROCE)


def test_torchrun_gets_the_node_rank_of_the_rank_file(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    path.write_text(rank_file_text(["b.example", "a.example"], "an order"))
    assert read_rank_file(path) == ["b.example", "a.example"]
    words = ["--rank-file", str(path), "--nproc-per-node", "8", "-m", "lakh", "train", "node"]
    given = ["--nnodes=2", "--node-rank=1", "--master-addr=b.example", *words[2:]]
    assert with_rank_file(words, "a") == with_rank_file([f"--rank-file={path}", *words[2:]], "a.example") == given
    assert with_rank_file(words[2:], "a") == words[2:]
    with pytest.raises(UserError, match="is not in the rank file"):
        node_rank(["a", "b"], "c")
    with pytest.raises(UserError, match="names no file"):
        with_rank_file(["--rank-file", "-m", "lakh"])
    path.write_text("a\na\n")
    with pytest.raises(UserError, match="twice"):
        read_rank_file(path)


@pytest.mark.slow
def test_the_command_writes_a_rank_file(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    words = ["plan", "place", "--model", "llama3-70b", "--cluster", "llama3-24k-roce", "--gpus", "6144", "--tp", "8",
             "--pp", "8", "--batch", "768", "--busy", "0.4"]  # fmt: skip
    code, text, _ = lakh(*words, "--out", str(out), "--json")
    assert code == 0
    data = last_line(text)
    assert {"cut", "baselines", "rank_file"} <= set(data)
    assert len(read_rank_file(out)) == 768
    assert all(data["cut"] <= one["cuts_bytes"][data["tier"]] for one in data["baselines"].values())
    code, text, _ = lakh(*words)
    assert code == 0
    assert "free nodes" in text
