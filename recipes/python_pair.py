"""A pair of Python models for one GPU and a quarter of an hour: a target, and a draft that guesses ahead for it.

Both learn from the same tokens (16,384 entries, fill-in-the-middle marks among them) in the same form, so that the
draft speaks the target's language: whole files fitted into rows of 2,048, half of them in fill-in-the-middle form.
The data, the commands and what came of it: docs/explanation/models/lakh-python.md.

Made for little time rather than for many tokens: Muon, which needs far fewer of them; one table for embedding and
output; a rate that falls in a straight line to zero; batches of a quarter million tokens. What each is worth at the
draft's size: `scripts/python_pair.sh ablations`.
"""

from dataclasses import replace

from lakh.spec import Checkpoints, Data, Model, Optimizer, Run, Source, Training
from lakh.spec.cluster import load_cluster

VOCAB = 16_384
CONTEXT = 2048


def target() -> Run:
    """100.7 million parameters."""
    return Run(
        name="python-target",
        cluster=load_cluster("h200"),
        model=Model(
            layers=14, width=768, heads=6, kv_heads=2, ffn=2048, vocab=VOCAB, context=CONTEXT, rope_base=10_000.0
        ),  # heads of 128: 6.5 % more tokens a second than 12 of 64 (bench/results/train_NVIDIA-H200_2026-11-15.md)
        data=_data(batch=128, micro_batch=128),
        optim=Optimizer(kind="muon", lr=2.5e-3, schedule="linear", min_lr_ratio=0.0, warmup_steps=60),
        train=Training(steps=1900, precision="bf16", eval_every=200, eval_sequences=128),
        checkpoint=Checkpoints(every=400, keep=1),
    )


def target2() -> Run:
    """The target goes on where its first run ended, with Debian's sources beside the package index."""
    first = target()
    return replace(
        first,
        name="python-target2",
        init_from="gguf/target",
        data=replace(first.data, mixture=(Source(tokens="tokens/train", weight=4), Source(tokens="tokens/debian"))),
        optim=replace(first.optim, lr=1e-3, warmup_steps=40),  # below half of the first peak: little is to be unlearnt
        train=replace(first.train, steps=800),
    )


def draft() -> Run:
    """12.6 million parameters, half of them the embedding: a seventh of the target's work for a token."""
    return Run(
        name="python-draft",
        cluster=load_cluster("h200"),
        model=Model(
            layers=4, width=384, heads=6, kv_heads=2, ffn=1024, vocab=VOCAB, context=CONTEXT, rope_base=10_000.0
        ),
        data=_data(batch=128, micro_batch=128),
        optim=Optimizer(kind="muon", lr=4e-3, schedule="linear", min_lr_ratio=0.0, warmup_steps=40),
        train=Training(steps=700, precision="bf16", eval_every=200, eval_sequences=128),
        checkpoint=Checkpoints(every=400, keep=1),
    )


def _data(*, batch: int, micro_batch: int) -> Data:
    return Data(
        tokens="tokens/heldout",  # repositories that training never sees: what is evaluated on
        mixture=(Source(tokens="tokens/train"),),
        sequence=CONTEXT,
        batch=batch,
        micro_batch=micro_batch,
        packing="best-fit",
        fim_rate=0.5,
        fim_spm=0.25,  # at 0.5 the draft took every <|fim_middle|> for the beginning of a file
    )
