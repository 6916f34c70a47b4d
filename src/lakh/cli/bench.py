"""lakh bench: the table of benchmarks. Each runs lakh and the peer it names in the same run."""

from __future__ import annotations

import click

from lakh.cli.lazy import LazyGroup

__all__ = ["BENCHES", "bench"]

# name -> (where it is, what it does): one file per benchmark, so that one benchmark's libraries stay out of the others.
BENCHES = {
    "train": ("lakh.cli.bench_train:train", "Training speed beside transformers' Llama of the same shape."),
}


@click.group(cls=LazyGroup, commands_table=BENCHES)
def bench() -> None:
    """Measure lakh against a peer, in the same run."""
