"""A run of the recommendation workload that takes seconds."""

from lakh.spec import Checkpoints, Data, Optimizer, Run, Training
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender

__all__ = ["clicks"]


def clicks() -> Run:
    tables = tuple(EmbeddingTable(name=f"t{i}", rows=50 * (i + 1), width=8, pooling=2) for i in range(4))
    network = ClickNetwork(dense_features=4, bottom=(8,), top=(16,))
    return Run(
        name="clicks",
        workload="dlrm",
        dlrm=Recommender(samples=2000, tables=tables, network=network, sharding="table-wise"),
        data=Data(sequence=1, batch=32, micro_batch=16, prefetch=4),
        optim=Optimizer(lr=1e-2, clip_norm=0.0, schedule="constant", warmup_steps=0),
        train=Training(steps=30, eval_every=10, eval_sequences=100, device="cpu", threads=1),
        checkpoint=Checkpoints(every=10),
    )
