"""One rank that shards an EmbeddingBagCollection of TorchRec by lakh's plan and looks up a batch.

python torchrec_rank.py PLAN TABLES STORE OUT, with RANK and WORLD_SIZE.
"""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lakh.planner.embedding.plan_file import read_plan
from lakh.workloads.dlrm.torchrec_plan import torchrec_sharding_plan


def main(plan_path: str, tables_path: str, store: str, out: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with open(tables_path) as file:
        tables = json.load(file)["tables"]
    configs = [
        EmbeddingBagConfig(
            name=table["name"],
            num_embeddings=table["rows"],
            embedding_dim=table["width"],
            feature_names=[table["name"]],
            init_fn=partial(torch.nn.init.constant_, val=index + 1.0),
        )
        for index, table in enumerate(tables)
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    model = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=torchrec_sharding_plan(read_plan(plan_path), "0", device="cpu"),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    names = [table["name"] for table in tables]
    lengths = torch.full((2 * len(names),), 2, dtype=torch.int64)  # two samples of two ids
    batch = KeyedJaggedTensor(names, torch.ones(4 * len(names), dtype=torch.int64), lengths=lengths)
    pooled = model(batch)
    sums = {name: pooled[name].sum(dim=1).tolist() for name in names}
    with open(f"{out}.{rank}", "w") as file:
        json.dump(sums, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
