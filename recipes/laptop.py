"""A model of a few million parameters that learns visible Python in minutes on two CPU cores."""

from lakh.spec import Data, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def laptop() -> Run:
    return Run(
        name="laptop",
        cluster=load_cluster("laptop"),
        model=Model(layers=4, width=192, heads=6, kv_heads=2, ffn=512, vocab=4096, context=512),
        data=Data(tokens="tokens", sequence=256, batch=8, micro_batch=4),
        optim=Optimizer(kind="muon", lr=4e-3, warmup_steps=20),
        train=Training(steps=220, eval_every=50, eval_sequences=32),
    )
