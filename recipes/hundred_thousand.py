"""70 billion parameters with a context of 16,384 tokens on 98,304 GPUs: one lakh, in whole groups of the cluster.

Tensor parallelism stays inside a node, 8 nodes share each sequence (context parallelism), and 8 such groups share one
copy of the weights: 512 GPUs with 2.2 GB of AdamW state each. Copies grow with the cluster; 192 of them make a batch of
25 million tokens, about as large as published runs end with. For planning: nobody has run it.
"""

from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def hundred_thousand() -> Run:
    copies = 98_304 // 512
    return Run(
        name="code-70b-100k",
        cluster=load_cluster("h100-100k"),
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
        mesh=Mesh(dp_replicate=copies, dp_shard=8, cp=8, tp=8),
        data=Data(tokens="s3://corpus/tokens", sequence=16384, batch=copies * 8, micro_batch=1, prefetch=100),
        optim=Optimizer(lr=1e-4, warmup_steps=2000),
        train=Training(steps=40_000, precision="bf16", recompute="selective", eval_every=1000, eval_sequences=3072),
    )
