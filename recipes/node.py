"""One GPU, or one node of eight: a 1.2-billion-parameter code model with a context of 4,096 tokens."""

from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def node() -> Run:
    return Run(
        name="node",
        cluster=load_cluster("8xh100"),
        model=Model(
            layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096, rope_base=500_000.0
        ),
        mesh=Mesh(dp_shard=-1),
        data=Data(tokens="tokens", sequence=4096, batch=128, micro_batch=4),
        optim=Optimizer(lr=4e-4, warmup_steps=500),
        train=Training(steps=20_000, precision="bf16", eval_every=500, eval_sequences=256),
    )
