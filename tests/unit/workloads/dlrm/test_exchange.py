"""Parts of the exchange: the layout of two levels, and operations that other devices than a CPU use."""

import dataclasses

import numpy as np
import pytest
import torch

from lakh.errors import InfeasiblePlan
from lakh.spec.embedding import EmbeddingTable, check_plan
from lakh.workloads.dlrm.sharding import codec, columns
from lakh.workloads.dlrm.sharding.layout import ShardLayout
from lakh.workloads.dlrm.sharding.plans import plan_of_kind

TABLES = tuple(
    EmbeddingTable(name=f"t{i}", rows=rows, width=8, features=1 + i % 2) for i, rows in enumerate([1, 9, 30])
)


def test_tables_of_a_node_share_its_columns() -> None:
    layout = ShardLayout(plan_of_kind("table-row-wise", TABLES, 4, 2), TABLES)
    assert [parts.columns for parts in layout.flat] == [0, 0, 0, 0]
    assert sorted(s.table.name for parts in layout.nodes for s in parts.slices) == ["t0", "t1", "t2"]
    for rank, parts in enumerate(layout.in_node):
        moves, node = layout.moves_to_node(rank), layout.nodes[rank // 2]
        for (own, in_node, width, _), (_, target, _, _) in zip(moves, parts.moves, strict=True):
            assert (in_node, target, width) in [tuple(move[:3]) for move in node.moves], own
    held = [part.table.name for parts in layout.in_node for part in parts.slices]
    assert held.count("t0") == 1  # its one row is on one rank of the node
    assert held.count("t2") == 2


@pytest.mark.parametrize(("ranks", "node_size"), [(2, 2), (3, 2), (2, 1)])
def test_one_node_and_uneven_nodes_have_one_level(ranks: int, node_size: int) -> None:
    layout = ShardLayout(plan_of_kind("table-row-wise", TABLES, ranks, node_size), TABLES)
    assert layout.nodes == []
    assert sum(len(parts.slices) for parts in layout.flat) >= len(TABLES)


def test_a_table_row_wise_table_on_two_nodes_is_refused() -> None:
    plan = plan_of_kind("table-row-wise", TABLES, 4, 2)
    shards = tuple(dataclasses.replace(shard, rank=(shard.rank + 1) % 4) for shard in plan.shards)
    with pytest.raises(InfeasiblePlan, match="table-row-wise with ranks of several nodes of 2"):
        check_plan(dataclasses.replace(plan, shards=shards), TABLES)


def test_columns_move_the_same_on_other_devices() -> None:
    random = torch.Generator().manual_seed(1)
    moves = np.array([(0, 8, 4, 0), (4, 0, 8, 1), (12, 12, 4, 1)], np.int64)
    values, before = torch.randn(5, 16, generator=random), torch.randn(5, 20, generator=random)
    here, there = before.clone(), before.clone()
    columns.add_columns(values, moves, here)
    columns.add_on_device(values, moves, there)
    assert torch.equal(here, there)
    assert not torch.equal(here, before)
    taken = torch.empty(5, 16)
    columns.take_on_device(here, moves, taken)
    assert torch.equal(taken, columns.take_columns(here, moves))


def test_int8_is_the_same_on_other_devices() -> None:
    values = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    values[3, 8:12] = 0.0  # a part without a scale
    widths = np.array([8, 4, 12], np.int64)
    coded = codec.encode("int8", values, widths)
    assert torch.equal(coded, codec.encode_on_device(values, widths))
    assert torch.equal(codec.decode("int8", coded, widths), codec.decode_on_device(coded, widths))
