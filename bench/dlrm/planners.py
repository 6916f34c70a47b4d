"""lakh's sharding planner beside TorchRec's, on the MLPerf tables, both rated by TorchRec's own estimator.

TorchRec plans with its defaults (16 ranks in nodes of 8, 80 GB, narrowest column slice 128). lakh's plan is exported,
its shards are priced by TorchRec's EmbeddingPerfEstimator, and the slowest rank of each plan is compared.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from typing import Any

from bench.dlrm.bars import PLANNER, with_bar
from bench.harness import BenchRow, Peer
from lakh.planner.embedding.cost_model import MemorySizes, cost_model
from lakh.planner.embedding.sharding import ShardingResult, plan_sharding
from lakh.planner.embedding.tables import parse_tables, read_text
from lakh.spec.cluster import load_cluster
from lakh.spec.embedding import EmbeddingTable

__all__ = ["TORCHREC", "bench_planners"]

TORCHREC = Peer("torchrec", modules=("torchrec", "fbgemm_gpu"), install="docs/how-to/dlrm.md")
HBM_BYTES = 80 * 2**30
NODE = 8
MILP_S = 20.0


def bench_planners(
    ranks: int, batches: Sequence[int], with_torchrec: bool, *, milp_s: float = MILP_S
) -> list[BenchRow]:
    tables = parse_tables(*read_text("mlperf-dcnv2"))
    rows: list[BenchRow] = []
    for batch in batches:
        theirs = _torchrec(tables, ranks, batch) if with_torchrec else None
        if theirs:
            what = f"MLPerf-26, {ranks} ranks, batch {batch}, slowest rank (ms, TorchRec's estimate)"
            rows.append({"system": "torchrec", "what": what, "value": theirs["ms"], "seconds": theirs["seconds"]})
        for width in (128, 32):
            found = _lakh(tables, ranks, batch, width, milp_s)
            value = theirs["rate"](found) if theirs else found.bottleneck_ms
            what = f"MLPerf-26, {ranks} ranks, batch {batch}, width >= {width}, slowest rank (ms)"
            row: BenchRow = {
                "system": "lakh",
                "what": what,
                "value": value,
                "ratio": theirs["ms"] / value if theirs else None,
                "lower_bound": found.lower_bound_ms,
                "seconds": found.seconds,
                "engine": found.engine,
            }
            rows.append(with_bar(row, PLANNER, possible=theirs["ms"] / found.lower_bound_ms if theirs else None))
    return rows


def _lakh(tables: list[EmbeddingTable], ranks: int, batch: int, width: int, milp_s: float) -> ShardingResult:
    memory = MemorySizes(device=0.85 * HBM_BYTES)  # TorchRec reserves 15 % too
    costs = cost_model("torchrec", load_cluster("h100-pod"), ranks, batch=batch, min_width=width, memory=memory)
    return plan_sharding(tables, costs, costs.limits, milp_time_s=milp_s)


def _torchrec(tables: list[EmbeddingTable], ranks: int, batch: int) -> dict[str, Any]:
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=t.name, embedding_dim=t.width, num_embeddings=t.rows, feature_names=[t.name])
        for t in tables
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    topology = Topology(world_size=ranks, compute_device="cuda", hbm_cap=HBM_BYTES, local_world_size=NODE)
    constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling]) for t in tables}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=batch)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        planner.plan(model, sharders)
    seconds = time.perf_counter() - began
    loads = [0.0] * ranks
    for option in planner._best_plan or []:
        for shard in option.shards:
            assert shard.rank is not None
            assert shard.perf is not None
            loads[shard.rank] += shard.perf.total

    def rate(found: ShardingResult) -> float:
        """The slowest rank of lakh's plan, priced by TorchRec's estimator."""
        return _rate(found, planner, model, sharders)

    return {"ms": max(loads), "seconds": seconds, "rate": rate}


def _rate(found: ShardingResult, planner: Any, model: Any, sharders: Any) -> float:
    from torchrec.distributed.planner.types import Shard

    enumerated = {
        (o.name, o.sharding_type, o.compute_kernel): o for o in planner._enumerator.enumerate(model, sharders)
    }
    options, ranks = [], []
    by_table: dict[str, list[Any]] = {}
    for shard in found.plan.shards:
        by_table.setdefault(shard.table, []).append(shard)
    for name, shards in by_table.items():
        kernel = "dense" if shards[0].kind == "data-parallel" else "fused"
        option = enumerated[name, shards[0].kind.replace("-", "_"), kernel]
        option.shards = [
            Shard(size=[s.rows[1] - s.rows[0], s.columns[1] - s.columns[0]], offset=[s.rows[0], s.columns[0]])
            for s in shards
        ]
        options.append(option)
        ranks.append([s.rank for s in shards])
    planner._enumerator._estimators[0].estimate(options, planner._enumerator._sharder_data_map)
    loads = [0.0] * found.plan.ranks
    for option, of_option in zip(options, ranks, strict=True):
        for shard, rank in zip(option.shards, of_option, strict=True):
            loads[rank] += shard.perf.total
    return max(loads)
