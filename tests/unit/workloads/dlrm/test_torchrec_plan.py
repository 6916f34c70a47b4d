"""TorchRec itself accepts exported plans: the same shards as its own, and a sharded lookup on two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakh.errors import UserError
from lakh.planner.embedding.plan_file import read_plan
from lakh.spec.embedding import EmbeddingPlan, EmbeddingShard
from lakh.workloads.dlrm.torchrec_plan import torchrec_sharding_plan

needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed; docs/how-to/dlrm.md says how"
)
RANK = Path(__file__).with_name("torchrec_rank.py")


def shard(table: str, kind: str, rank: int, rows: tuple[int, int], columns: tuple[int, int]) -> EmbeddingShard:
    return EmbeddingShard(table, kind, "device", rank, rows, columns, 1.0, 100)  # type: ignore[arg-type]


PLAN = EmbeddingPlan(
    ranks=2,
    node_size=2,
    shards=(
        shard("whole", "table-wise", 1, (0, 10), (0, 8)),
        shard("wide", "column-wise", 0, (0, 12), (0, 16)),
        shard("wide", "column-wise", 1, (0, 12), (16, 24)),
        shard("copies", "data-parallel", 0, (0, 4), (0, 8)),
        shard("copies", "data-parallel", 1, (0, 4), (0, 8)),
    ),
)
TABLES = [("whole", 10, 8), ("wide", 12, 24), ("copies", 4, 8)]


@needs_torchrec
@pytest.mark.slow
def test_shards_of_every_kind_are_torchrecs_own() -> None:
    """Its enumerator and `to_sharding_plan` describe the same sizes, offsets and ranks."""
    import torch
    from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

    rows, width, ranks = 10, 16, 4
    ours = {
        "table_wise": [shard("t", "table-wise", 2, (0, rows), (0, width))],
        "row_wise": [shard("t", "row-wise", r, (min(3 * r, rows), min(3 * r + 3, rows)), (0, width)) for r in range(4)],
        "column_wise": [shard("t", "column-wise", r, (0, rows), (8 * r, 8 * r + 8)) for r in range(2)],
        "table_row_wise": [shard("t", "table-row-wise", r + 2, (5 * r, 5 * r + 5), (0, width)) for r in range(2)],
    }
    for sharding_type, shards in ours.items():
        plan = EmbeddingPlan(ranks, 2, tuple(shards))
        parameter = torchrec_sharding_plan(plan, "ebc").plan["ebc"]["t"]
        sizes, offsets = calculate_shard_sizes_and_offsets(
            torch.empty(rows, width, device="meta"), ranks, 2, sharding_type, col_wise_shard_dim=8
        )
        assert parameter.sharding_type == sharding_type
        assert [entry.shard_sizes for entry in parameter.sharding_spec.shards] == sizes
        assert [entry.shard_offsets for entry in parameter.sharding_spec.shards] == offsets
        assert parameter.ranks == [s.rank for s in shards]


@needs_torchrec
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_distributed_model_parallel_runs_with_an_exported_plan(tmp_path: Path) -> None:
    """Every table is filled with one number, so a sum over a bag of two ids is 2 x number x width."""
    from dataclasses import asdict

    document = {"ranks": [{}, {}], "node_size": 2, "shards": [asdict(s) for s in PLAN.shards]}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    tables = [{"name": name, "rows": rows, "width": width} for name, rows, width in TABLES]
    (tmp_path / "tables.json").write_text(json.dumps({"tables": tables}))
    command = [sys.executable, str(RANK)] + [
        str(tmp_path / name) for name in ("plan.json", "tables.json", "store", "out")
    ]
    environment = {**os.environ, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, err = process.communicate(timeout=200)
            assert process.returncode == 0, err[-2000:]
    finally:
        for process in ranks:
            process.kill()
    for rank in range(2):
        sums = json.loads((tmp_path / f"out.{rank}").read_text())
        for index, (name, _, width) in enumerate(TABLES):
            assert sums[name] == [2.0 * (index + 1) * width] * 2, name


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"shards": [{"table": "t"}]}')
    with pytest.raises(UserError, match="is not a plan"):
        read_plan(tmp_path / "plan.json")
