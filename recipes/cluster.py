"""70 billion parameters with a context of 16,384 tokens on 24,576 and on 98,304 GPUs: for planning, nobody ran them.

Choose one: `lakh train recipes/cluster.py:code_70b_24k --dry-run`. Tensor parallelism stays inside a node, and copies
grow with the cluster. AdamW in mixed precision needs 16 bytes per parameter, 1.12 TB, which no node of 8 x 80 GB holds.
"""

from dataclasses import replace

from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def code_70b_24k() -> Run:
    """One copy over 64 GPUs, 384 copies."""
    copies = 24_576 // 64
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
        mesh=Mesh(dp_replicate=copies, dp_shard=8, tp=8),
        data=Data(tokens="s3://corpus/tokens", sequence=16384, batch=copies * 8, micro_batch=1, prefetch=100),
        optim=Optimizer(lr=1e-4, warmup_steps=2000),
        train=Training(steps=28_000, precision="bf16", eval_every=1000, eval_sequences=4096),
    )


def code_70b_100k() -> Run:
    """One lakh, in whole groups of the cluster: 8 nodes share each sequence, and 8 such groups, of ten layers each, are
    one copy.

    512 GPUs with 2.2 GB of AdamW state each. 192 copies make a batch of 25 million tokens, about as large as published
    runs end with, and leave each GPU with 256 tokens: simulated, a step takes 1.29 s at 9.6 % MFU (1.90 s at 6.5 %
    where the 8 groups share the weights instead of the layers). Larger batches use that many GPUs better.
    """
    run, copies = code_70b_24k(), 98_304 // 512
    return replace(
        run,
        name="code-70b-100k",
        cluster=load_cluster("h100-100k"),
        mesh=Mesh(dp_replicate=copies, dp_shard=1, pp=8, pp_schedule="interleaved", cp=8, tp=8),
        data=replace(run.data, batch=copies * 8),
        train=replace(run.train, steps=40_000, eval_sequences=3072),
    )
