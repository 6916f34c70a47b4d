"""Code models from 160 million to 7 billion parameters, on one GPU or one node of eight.

Choose one: `lakh train recipes/sizes.py:code_1b`. What fits without recomputation on 80 GB is trained so; larger ones
recompute what is cheap. From 1 billion on heads have 128 elements, the size that attention kernels like best.
"""

from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def code_160m() -> Run:
    """A draft model, or a first try: a day on one GPU for 20 billion tokens."""
    return Run(
        name="code-160m",
        cluster=load_cluster("h200"),
        model=Model(layers=16, width=768, heads=12, kv_heads=12, ffn=2048, vocab=32064, context=2048, tied=False),
        data=Data(tokens="tokens", sequence=2048, batch=256, micro_batch=32),
        optim=Optimizer(lr=6e-4, warmup_steps=500),
        train=Training(steps=40_000, precision="bf16", eval_every=1000, eval_sequences=256),
    )


def code_1b() -> Run:
    """A node of eight GPUs, context of 16,384 tokens."""
    return Run(
        name="code-1b",
        cluster=load_cluster("8xh100"),
        model=Model(
            layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=16384, rope_base=500_000.0
        ),
        mesh=Mesh(dp_shard=-1),
        data=Data(tokens="tokens", sequence=4096, batch=128, micro_batch=4),
        optim=Optimizer(lr=4e-4, warmup_steps=500),
        train=Training(steps=20_000, precision="bf16", eval_every=500, eval_sequences=256),
    )


def code_3b() -> Run:
    """A node of eight GPUs; recomputes the activations that are cheap."""
    return Run(
        name="code-3b",
        cluster=load_cluster("8xh100"),
        model=Model(
            layers=28, width=3072, heads=24, kv_heads=8, ffn=8192, vocab=49152, context=16384, rope_base=500_000.0
        ),
        mesh=Mesh(dp_shard=-1),
        data=Data(tokens="tokens", sequence=8192, batch=128, micro_batch=1),
        optim=Optimizer(lr=3e-4, warmup_steps=1000),
        train=Training(steps=50_000, precision="bf16", recompute="selective", eval_every=1000, eval_sequences=256),
    )


def code_7b() -> Run:
    """A node of eight GPUs; recomputes all activations."""
    return Run(
        name="code-7b",
        cluster=load_cluster("8xh100"),
        model=Model(
            layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=49152, context=16384, tied=False,
            rope_base=500_000.0,
        ),
        mesh=Mesh(dp_shard=-1),
        data=Data(tokens="tokens", sequence=8192, batch=256, micro_batch=1),
        optim=Optimizer(lr=3e-4, warmup_steps=2000),
        train=Training(steps=100_000, precision="bf16", recompute="full", eval_every=1000, eval_sequences=256),
    )  # fmt: skip
