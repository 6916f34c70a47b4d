"""One of the ranks of `lakh bench dlrm --part steps`: whole training steps of lakh and TorchRec over gloo.

python -m bench.dlrm.step_rank RANK RANKS STORE ROUNDS SHAPE [torchrec]; rank 0 prints one JSON document.

Both systems train DLRM with the same layers on the same batches, each with its own model: distribution of the ids,
lookup, exchange of the pooled embeddings, forward and backward of the network, exchange of the gradients, row-wise
AdaGrad and AdamW. One thread for each rank. Rounds alternate between the systems.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lakh.spec.embedding import ClickNetwork, EmbeddingTable
from lakh.trainer.step import update
from lakh.workloads.dlrm.batch import ClickBatch
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.loss import click_loss
from lakh.workloads.dlrm.model import ClickModel
from lakh.workloads.dlrm.sharding.exchange import TableExchange
from lakh.workloads.dlrm.sharding.layout import ShardLayout
from lakh.workloads.dlrm.sharding.plans import plan_of_kind
from lakh.workloads.dlrm.sharding.tables import ShardedTables

STEPS, WARM_UP_STEPS, BATCHES = 10, 2, 4
ZIPF, DENSE_LR, TABLE_LR = 1.05, 1e-3, 0.01


def main(arguments: list[str]) -> None:
    rank, ranks, store, rounds, shape, *peers = arguments
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    torch.set_num_threads(1)
    sizes = json.loads(shape)
    tables = [
        EmbeddingTable(name=f"t{i}", rows=sizes["rows"], width=sizes["width"], pooling=sizes["pooling"])
        for i in range(sizes["tables"])
    ]
    network = ClickNetwork(dense_features=13, bottom=(128,), top=(256, 64))
    batches = [_samples(tables, sizes, seed=100 * step + int(rank)) for step in range(BATCHES)]
    systems = {"lakh": _lakh(network, tables, batches, int(rank), int(ranks))}
    if "torchrec" in peers:
        systems["torchrec"] = _torchrec(network, tables, batches)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for round_ in range(int(rounds) + 1):
        for name, step in systems.items():
            steps = STEPS if round_ else WARM_UP_STEPS
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for number in range(steps):
                step(number)
            dist.barrier()
            if round_:
                times[name].append(((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps))
    if rank == "0":
        sys.stdout.write(json.dumps(times))
    dist.destroy_process_group()


Samples = tuple[JaggedBags, Tensor, Tensor]


def _samples(tables: list[EmbeddingTable], sizes: dict[str, int], seed: int) -> Samples:
    """Ids by Zipf's law, in random places of the tables, as click logs have them."""
    random = np.random.default_rng(seed)
    batch, pooling, rows = sizes["batch"], sizes["pooling"], sizes["rows"]
    places = np.random.default_rng(0).permutation(rows)
    ids = places[(random.zipf(ZIPF, len(tables) * batch * pooling) - 1) % rows]
    bags = JaggedBags.of_lengths(torch.from_numpy(ids), torch.full((len(tables), batch), pooling))
    dense = torch.from_numpy(random.standard_normal((batch, 13), dtype=np.float32))
    return bags, dense, torch.from_numpy(random.integers(0, 2, batch).astype(np.float32))


def _lakh(
    network: ClickNetwork, tables: list[EmbeddingTable], batches: list[Samples], rank: int, ranks: int
) -> Callable[[int], None]:
    exchange = TableExchange(ShardLayout(plan_of_kind("table-wise", tables, ranks, ranks), tables), rank)
    sharded = ShardedTables(exchange, seed=1)
    model = ClickModel(network, tables, sharded, seed=1)
    optimizer = torch.optim.AdamW(model.dense_parameters(), lr=DENSE_LR, fused=True)
    optimizer.register_step_post_hook(lambda *_: sharded.step(TABLE_LR))

    def run_pass(model: nn.Module, batch: ClickBatch, scale: float | Tensor) -> Tensor:
        loss = click_loss(model(batch), batch, scale)
        loss.backward()
        return loss.detach()

    def step(number: int) -> None:
        bags, dense, labels = batches[number % len(batches)]
        update(model, optimizer, [ClickBatch(exchange.distribute(bags), dense, labels)], lr=DENSE_LR, run_pass=run_pass)

    return step


def _torchrec(network: ClickNetwork, tables: list[EmbeddingTable], batches: list[Samples]) -> Callable[[int], None]:
    with contextlib.redirect_stdout(io.StringIO()):
        return _build_torchrec(network, tables, batches)


def _build_torchrec(
    network: ClickNetwork, tables: list[EmbeddingTable], batches: list[Samples]
) -> Callable[[int], None]:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [table.name for table in tables]
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name, num_embeddings=table.rows, embedding_dim=table.width, feature_names=[table.name]
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )
    model = DLRM(
        embedding_bag_collection=collection,
        dense_in_features=network.dense_features,
        dense_arch_layer_sizes=[*network.bottom, tables[0].width],
        over_arch_layer_sizes=[*network.top, 1],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": TABLE_LR})
    sharded = DistributedModelParallel(model, device=torch.device("cpu"))
    dense_parameters = [p for _, p in in_backward_optimizer_filter(sharded.named_parameters())]
    optimizer = torch.optim.AdamW(dense_parameters, lr=DENSE_LR, fused=True)

    def step(number: int) -> None:
        bags, dense, labels = batches[number % len(batches)]
        keyed = KeyedJaggedTensor(names, bags.ids, lengths=bags.lengths_FB.reshape(-1))
        optimizer.zero_grad()
        logits = sharded(dense, keyed).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
