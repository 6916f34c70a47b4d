"""70 billion parameters with a context of 16,384 tokens on 24,576 GPUs, for planning.

The mesh keeps tensor parallelism inside a node and shards one copy over 32 GPUs: AdamW in mixed precision needs
16 bytes per parameter, 1.12 TB, which no node of 8 x 80 GB holds. Copies then grow with the cluster.
"""

from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def cluster() -> Run:
    copies = 768  # 768 copies x 32 GPUs = the 24,576 GPUs of the cluster file
    return Run(
        name="code-70b",
        cluster=load_cluster("llama3-24k-roce"),
        model=Model(
            layers=80,
            width=8192,
            heads=64,
            kv_heads=8,
            ffn=28672,
            vocab=49152,
            tied=False,
            context=16384,
            rope_base=500_000.0,
        ),
        mesh=Mesh(dp_replicate=copies, dp_shard=4, tp=8),
        data=Data(tokens="s3://corpus/tokens", sequence=16384, batch=copies * 4, micro_batch=1, prefetch=100),
        optim=Optimizer(lr=1e-4, warmup_steps=2000),
        train=Training(steps=28_000, precision="bf16", eval_every=1000, eval_sequences=4096),
    )
