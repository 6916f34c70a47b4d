"""lakh dlrm plan: the document, the page and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakh.cli.main import cli
from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.embedding import sharding

TABLES = """
[[tables]]
name = "item"
rows = 1_000_000
width = 128
pooling = 20.0

[[tables]]
name = "user"
rows = 5000
width = 32
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sharding, "SEARCH_ROUNDS", 4)
    path = tmp_path / "tables.toml"
    path.write_text(TABLES)
    return str(path)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["dlrm", "plan", *arguments], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.stdout


def test_the_document_has_the_plan_and_its_bound(tables: str, tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    found = json.loads(
        run(tables, "--cluster", "8xh100", "--milp-seconds", "1", "--out", out, "--json").splitlines()[-1]
    )
    assert found["lower_bound_ms"] <= found["bottleneck_ms"] == max(rank["ms"] for rank in found["ranks"])
    assert found["gap"] == pytest.approx(found["bottleneck_ms"] / found["lower_bound_ms"] - 1)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert {shard["table"] for shard in found["shards"]} == {"item", "user"}
    assert found["binds"]["reason"]
    assert found["cost_model"] == "cluster"
    assert json.loads(Path(out).read_text())["shards"] == found["shards"]


def test_the_page_says_that_times_are_estimates(tables: str) -> None:
    page = run(tables, "--cluster", "8xh100", "--ranks", "2", "--cost-model", "torchrec")
    assert "estimated under cost model torchrec" in page
    assert "█" in page


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "needs a cluster"),
        (["--cluster", "8xh100", "--ranks", "9"], "8 GPUs"),
        (["--cluster", "h100-pod", "--ranks", "12"], "multiple of 8"),
    ],
)
def test_impossible_requests_are_refused(tables: str, arguments: list[str], word: str) -> None:
    with pytest.raises((UserError, InfeasiblePlan), match=word):
        run(tables, *arguments)
