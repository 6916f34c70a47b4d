"""Exports an EmbeddingPlan as a ShardingPlan of TorchRec, for DistributedModelParallel(plan=...).

TorchRec is imported on use. It is not a dependency of lakh: each release of its kernels works with one release of torch
(docs/how-to/dlrm.md says which).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lakh.errors import UserError
from lakh.spec.embedding import EmbeddingPlan, EmbeddingShard

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

__all__ = ["torchrec_sharding_plan"]

SHARDING_TYPES = {kind: kind.replace("-", "_") for kind in ("table-wise", "column-wise", "row-wise", "table-row-wise")}
COMPUTE_KERNELS = {"device": "fused", "host": "fused_uvm", "file": "key_value"}


def torchrec_sharding_plan(plan: EmbeddingPlan, module: str, *, device: str = "cuda") -> ShardingPlan:
    """The plan for the EmbeddingBagCollection at `module`, its path in the model (empty for the model itself)."""
    try:
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
    except ModuleNotFoundError:
        todo = "install it with --no-deps as docs/how-to/dlrm.md says"
        raise UserError("torchrec_sharding_plan", "needs the package torchrec", todo) from None
    by_table: dict[str, list[EmbeddingShard]] = defaultdict(list)
    for shard in plan.shards:
        by_table[shard.table].append(shard)
    tables = EmbeddingModuleShardingPlan()
    for name, shards in by_table.items():
        tables[name] = _parameter(shards, plan, device)
    return ShardingPlan(plan={module: tables})


def _parameter(shards: list[EmbeddingShard], plan: EmbeddingPlan, device: str) -> Any:
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.types import ParameterSharding

    first = shards[0]
    if first.kind == "data-parallel":
        return ParameterSharding("data_parallel", "dense", ranks=list(range(plan.ranks)))
    ordered = sorted(shards, key=lambda shard: (shard.columns, shard.rows, shard.rank))
    metadata = [
        ShardMetadata(
            shard_offsets=[shard.rows[0], shard.columns[0]],
            shard_sizes=[shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0]],
            placement=f"rank:{shard.rank}/{_device(device, shard.rank, plan.node_size)}",
        )
        for shard in ordered
    ]
    return ParameterSharding(
        SHARDING_TYPES[first.kind],
        COMPUTE_KERNELS[first.tier],
        ranks=[shard.rank for shard in ordered],
        sharding_spec=EnumerableShardingSpec(metadata),
    )


def _device(device: str, rank: int, node_size: int) -> str:
    return device if device == "cpu" else f"{device}:{rank % node_size}"
