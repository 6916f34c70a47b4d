"""lakh tokens: train a tokenizer, pack a corpus."""

from __future__ import annotations

from dataclasses import asdict

import click

from lakh.cli.face import Answer, answers, table
from lakh.cli.progress import progress_bar
from lakh.tokens import learn, packing

__all__ = ["tokens"]


@click.group()
def tokens() -> None:
    """Train a tokenizer, pack a corpus into token shards."""


@tokens.command()
@click.argument("corpus")
@click.option("--out", required=True, metavar="DIR", help="Folder for the tokenizer.")
@click.option("--vocab", default=4096, show_default=True, help="Entries of the vocabulary, special tokens included.")
@click.option("--sample-bytes", default=learn.SAMPLE_BYTES, show_default=True, help="Text of the corpus to learn from.")
@click.option("--force", is_flag=True, help="Replace a tokenizer of another corpus or size.")
@answers
def train(corpus: str, out: str, vocab: int, sample_bytes: int, force: bool) -> Answer:
    """Train a byte-level BPE tokenizer on a corpus."""
    with progress_bar() as progress:
        made = learn.train(corpus, out, vocab=vocab, sample_bytes=sample_bytes, force=force, progress=progress)
    verb = "already trained, reused" if made.reused else "trained"
    text = f"{out}: {verb}; {made.vocab:,} tokens, learnt from {made.sampled_bytes / 1e6:,.1f} MB"
    if made.vocab < made.vocab_asked:
        text += f"\n{made.vocab_asked:,} were asked for: the sample has no more pairs that repeat"
    return Answer(asdict(made), text)


@tokens.command()
@click.argument("corpus")
@click.option("--tokenizer", "tokenizer_path", required=True, metavar="DIR", help="Made by `lakh tokens train`.")
@click.option("--out", required=True, metavar="DIR", help="Folder for the token shards.")
@click.option("--heldout", default=0.02, show_default=True, help="Share of the documents that training never sees.")
@click.option("--force", is_flag=True, help="Replace tokens of another corpus, tokenizer or share.")
@answers
def pack(corpus: str, tokenizer_path: str, out: str, heldout: float, force: bool) -> Answer:
    """Encode a corpus into token shards for training and evaluation."""
    with progress_bar() as progress:
        made = packing.pack(corpus, tokenizer_path, out, heldout_fraction=heldout, force=force, progress=progress)
    data = made.as_dict()
    rows = [(name, split["documents"], split["tokens"], split["shards"]) for name, split in data["splits"].items()]
    head = (
        f"{out}: {'already packed, reused' if made.reused else 'packed'}, {data['bytes_per_token']:.2f} bytes a token"
    )
    return Answer(data, table(["split", "documents", "tokens", "shards"], rows, title=head))
