"""Rows of lakh bench dlrm beside their bars."""

import pytest
from bench.dlrm.bars import with_bar
from bench.dlrm.operators import OperatorShape, bench_operators
from bench.dlrm.planners import bench_planners

from lakh.planner.embedding import sharding


def test_a_bar_is_reached_or_not_or_out_of_reach() -> None:
    assert with_bar({"ratio": 1.3}, 1.2)["reached"] == "yes"
    assert with_bar({"ratio": 1.1}, 1.2, possible=1.5)["reached"] == "no"
    assert with_bar({"ratio": 1.1}, 1.2, possible=1.15)["reached"] == "no plan can: the bound allows 1.15"
    assert with_bar({"ratio": None}, 1.2) == {"ratio": None}


def test_operators_have_bars_where_there_is_a_peer() -> None:
    rows = bench_operators(OperatorShape(tables=1, rows=50, width=8, batch=4, pooling=2), 1, with_fbgemm=False)
    bars = {row["system"]: row["at_least"] for row in rows if "at_least" in row}
    assert bars == {"torch EmbeddingBag + SparseAdam": 3.0}


def test_plans_without_torchrec_have_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SEARCH_ROUNDS", 4)
    (*rows,) = bench_planners(8, [64], with_torchrec=False, milp_s=0.0)
    assert all(row["value"] >= row["lower_bound"] > 0 and row["ratio"] is None for row in rows)
