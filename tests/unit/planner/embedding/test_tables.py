"""Readers of tables: TOML, EmbeddingBagCollection configs, TorchRec's statistics; and bad input with reasons."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum

import pytest

from lakh.errors import ConfigError, InfeasiblePlan, UserError
from lakh.planner.embedding.sharding import plan_sharding
from lakh.planner.embedding.tables import parse_tables, read_text, tables_of_configs
from lakh.planner.embedding.torchrec_stats import is_torchrec_stats, read_torchrec_stats
from lakh.spec.embedding import EmbeddingPlan, EmbeddingShard, EmbeddingTable, check_plan

GOOD = {"name": "t", "rows": 10, "width": 8}
BAD = [
    ({"rows": 0}, "rows"),
    ({"width": 10}, "multiple of 4"),
    ({"pooling": 0.0}, "pooling"),
    ({"name": " "}, "name"),
    ({"dtype": "f8"}, "dtype"),
    ({"raws": 3}, "raws"),
]

# The form of the text that TorchRec's EmbeddingStats prints, with made-up numbers: two ranks, three tables.
STATS = """
####################################################################
#                    --- Planner Statistics ---                    #
#      Rank        HBM (GB)     DDR (GB)        Perf (ms)     Input (MB)     Output (MB)         Shards      #
#    ------      ----------   ----------      -----------   ------------   -------------       --------      #
#         0    9.0 (72%)     0.0 (0%)    90.0 (10,30,20,30,0)        1.0        1.0    CW: 1 RW: 1            #
#         1    9.0 (72%)     0.0 (0%)    30.0 (5,10,5,10,0)        1.0        1.0    CW: 1 RW: 1              #
# Parameter Info:                                                                                               #
#  FQN     Sharding     Compute Kernel     Perf (ms)     Storage (HBM, DDR)     Cache Load Factor     Sum Pooling Factor     Sum Num Poolings     Num Indices     Output     Weighted     Sharder     Features     Emb Dim (CW Dim)     Hash Size     Ranks     Batch Sizes  #
#  -----   ----------   ----------------   -----------   --------------------   -------------------   --------------------   ------------------   -------------   --------   ----------   ---------   ----------   ------------------   -----------   -------   -------------  #
#  a.rw     RW     fused     40.0 (4,16,4,16,0)     (2.0 GB, 0.0 GB)     None     4.0     1.0     4.0     pooled     unweighted     S     1     128     1000     0-1     512  #
#  a.hot     CW     fused     60.0 (10,20,10,20,0)     (1.0 GB, 0.0 GB)     None     9.0     1.0     9.0     pooled     unweighted     S     1     128 (128)     5000     0     512  #
#  a.cold     CW     fused     8.0 (1,3,1,3,0)     (0.1 GB, 0.0 GB)     None     0.0     1.0     0.0     pooled     unweighted     S     1     64 (64)     77     1     n/a  #
#                                                                                                               #
# Maximum of Total Perf: 80.0 ms on rank 0 #
# Planning Memory:                         #
#    HBM: 20.0 GB, DDR: 128.0 GB           #
# Dense Storage (per rank):                #
#    HBM: 5.0 GB, DDR: 0.0 GB              #
# KJT Storage (per rank):                  #
#    HBM: 1.0 GB, DDR: 0.0 GB              #
"""  # noqa: E501


@pytest.mark.parametrize(("change", "word"), BAD)
def test_a_bad_table_is_refused_with_the_reason(change: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_tables(json.dumps([GOOD | change]), "tables.json")


@pytest.mark.parametrize(
    ("text", "origin", "word"),
    [
        ("[[tables]]\nname = ", "t.toml", "not TOML"),
        ("{", "t.json", "not JSON"),
        ("{}", "t.json", "no tables"),
        ('{"tables": []}', "t.json", "no tables"),
        ('{"tables": [], "batch": 3}', "t.json", "batch"),
        (json.dumps([GOOD, GOOD]), "t.json", "twice"),
        ("[1, 2]", "t.json", "not a list of tables"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(text: str, origin: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_tables(text, origin)


def test_the_mlperf_set_ships_with_lakh() -> None:
    tables = parse_tables(*read_text("mlperf-dcnv2"))
    assert len(tables) == 26
    assert sum(table.rows for table in tables) == 204_184_588  # the sum of the published list
    assert sum(table.pooling for table in tables) == 214
    with pytest.raises(UserError, match="mlperf-dcnv2"):
        read_text("mlperf")


class DataType(Enum):
    FP16 = "FP16"
    INT4 = "INT4"


@dataclass
class Config:
    """The fields of torchrec.modules.embedding_configs.EmbeddingBagConfig that matter here."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    data_type: DataType = DataType.FP16


def test_configs_of_an_embedding_bag_collection() -> None:
    configs = [Config("a", 100, 16, ["x", "y"]), Config("b", 7, 4, ["z"])]
    tables = tables_of_configs(configs, pooling={"b": 3.0})
    assert tables == [
        EmbeddingTable(name="a", rows=100, width=16, features=2, dtype="f16"),
        EmbeddingTable(name="b", rows=7, width=4, pooling=3.0, dtype="f16"),
    ]
    plain = {"name": "a", "num_embeddings": 100, "embedding_dim": 16, "feature_names": ["x", "y"], "data_type": "FP16"}
    assert parse_tables(json.dumps([plain]), "configs.json") == tables[:1]
    with pytest.raises(ConfigError, match="INT4"):
        tables_of_configs([Config("a", 1, 4, data_type=DataType.INT4)])


def test_torchrec_statistics_are_planned_with_their_own_costs() -> None:
    assert is_torchrec_stats(STATS)
    stats = read_torchrec_stats(STATS, min_width=64)
    assert [table.name for table in stats.tables] == ["a.rw", "a.hot", "a.cold"]
    assert stats.limits.ranks == 2
    assert stats.limits.tier_bytes["device"] == 14 * 2**30
    assert stats.bottleneck_ms == 80.0
    # Published: 20 ms of row-wise work on both ranks, hot (60 ms) on rank 0. In two halves of 64 columns, hot takes
    # (20 x 1.15 + 40) / 2 = 31.5 ms each; the best plan has one half and nothing else on a rank.
    found = plan_sharding(stats.tables, stats, stats.limits)
    assert found.bottleneck_ms == pytest.approx(20 + 31.5 + 8)
    assert found.lower_bound_ms <= found.bottleneck_ms
    whole = read_torchrec_stats(STATS, min_width=128)
    assert plan_sharding(whole.tables, whole, whole.limits).bottleneck_ms == pytest.approx(80.0)


@pytest.mark.parametrize(("old", "new"), [("FQN", "F"), ("Hash Size", "H"), ("Emb Dim", "E"), ("60.0 (10", "fast (10")])
def test_statistics_that_cannot_be_read_say_why(old: str, new: str) -> None:
    with pytest.raises(UserError, match="statistics"):
        read_torchrec_stats(STATS.replace(old, new), min_width=32)


TABLE = EmbeddingTable(name="t", rows=10, width=8)


def shard(rank: int, rows: tuple[int, int], columns: tuple[int, int], kind: str = "row-wise") -> EmbeddingShard:
    return EmbeddingShard("t", kind, "device", rank, rows, columns, 1.0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ([], "no shard"),
        ([shard(0, (0, 5), (0, 8))], "shards hold 40"),
        ([shard(0, (0, 6), (0, 8)), shard(1, (4, 8), (0, 8))], "overlapping"),
        ([shard(0, (0, 10), (0, 8)), shard(2, (0, 0), (0, 8))], "rank 2 of 2"),
        ([shard(0, (0, 11), (0, 8))], r"rows \[0, 11\)"),
        ([shard(0, (0, 10), (0, 8), "data-parallel")], "each rank"),
        ([shard(0, (0, 5), (0, 8)), shard(1, (5, 10), (0, 8), "table-wise")], "several ways"),
    ],
)
def test_a_plan_that_does_not_cover_a_table_once_is_refused(shards: list[EmbeddingShard], reason: str) -> None:
    with pytest.raises(InfeasiblePlan, match=reason):
        check_plan(EmbeddingPlan(2, 2, tuple(shards)), [TABLE])


def test_plans_that_cover_a_table_once_pass() -> None:
    grid = [shard(r, (5 * r, 5 * r + 5), (4 * c, 4 * c + 4)) for r in range(2) for c in range(2)]
    copies = [shard(rank, (0, 10), (0, 8), "data-parallel") for rank in range(2)]
    for shards in (grid, copies, [shard(1, (0, 10), (0, 8)), shard(0, (10, 10), (0, 8))]):
        check_plan(EmbeddingPlan(2, 2, tuple(shards)), [TABLE])
