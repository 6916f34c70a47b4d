"""lakh tokens: train a tokenizer, pack a corpus.

What does the work is imported when a command is called: `--help` needs no extra and answers at once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, print_result, set_option, table
from lakh.cli.progress import progress_bar
from lakh.spec import load_run

if TYPE_CHECKING:
    from lakh.tokens.packing import Ordering

__all__ = ["SAMPLE_BYTES", "tokens"]

SAMPLE_BYTES = 32_000_000  # a test holds it to lakh.tokens.learn


@click.group(cls=HintingGroup)
def tokens() -> None:
    """Train a tokenizer, pack a corpus into token shards."""


@tokens.command()
@click.argument("corpus")
@click.option("--out", required=True, metavar="DIR", help="Folder for the tokenizer.")
@click.option("--vocab", default=4096, show_default=True, help="Entries of the vocabulary, special tokens included.")
@click.option("--sample-bytes", default=SAMPLE_BYTES, show_default=True, help="Text of the corpus to learn from.")
@click.option("--force", is_flag=True, help="Replace a tokenizer of another corpus or size.")
@print_result
def train(corpus: str, out: str, vocab: int, sample_bytes: int, force: bool) -> CommandResult:
    """Train a byte-level BPE tokenizer on a corpus."""
    from lakh.tokens import learn

    with progress_bar() as progress:
        made = learn.train(corpus, out, vocab=vocab, sample_bytes=sample_bytes, force=force, progress=progress)
    verb = "already trained, reused" if made.reused else "trained"
    text = f"{out}: {verb}; {made.vocab:,} tokens, learnt from {made.sampled_bytes / 1e6:,.1f} MB"
    if made.vocab < made.vocab_asked:
        text += f"\n{made.vocab_asked:,} were asked for: the sample has no more pairs that repeat"
    return CommandResult(asdict(made), text)


@tokens.command()
@click.argument("corpus")
@click.option("--tokenizer", "tokenizer_path", required=True, metavar="DIR", help="Made by `lakh tokens train`.")
@click.option("--out", required=True, metavar="DIR", help="Folder for the token shards.")
@click.option("--heldout", default=0.02, show_default=True, help="Share of the documents that training never sees.")
@click.option(
    "--order",
    type=click.Choice(["document", "repository"]),
    default="document",
    show_default=True,
    help="Shuffle files, or keep those of a repository together in the order of their imports.",
)
@click.option("--force", is_flag=True, help="Replace tokens of another corpus, tokenizer or share.")
@print_result
def pack(corpus: str, tokenizer_path: str, out: str, heldout: float, order: Ordering, force: bool) -> CommandResult:
    """Encode a corpus into token shards for training and evaluation.

    DIR may be a URL such as s3://bucket/tokens: training reads it in pieces and keeps them in a local cache.
    """
    from lakh.tokens import packing

    with progress_bar() as progress:
        made = packing.pack(
            corpus, tokenizer_path, out, heldout_fraction=heldout, order=order, force=force, progress=progress
        )
    data = made.as_dict()
    rows = [(name, split["documents"], split["tokens"], split["shards"]) for name, split in data["splits"].items()]
    head = (
        f"{out}: {'already packed, reused' if made.reused else 'packed'}, {data['bytes_per_token']:.2f} bytes a token"
    )
    return CommandResult(data, table(["split", "documents", "tokens", "shards"], rows, title=head))


@tokens.command()
@click.argument("run")
@set_option
@click.option("--steps", type=click.IntRange(min=0), help="Steps to hash; those of the whole run by default.")
@click.option("--show", type=click.IntRange(min=0), help="Print the sequence at this position.")
@print_result
def stream(run: str, sets: tuple[str, ...], steps: int | None, show: int | None) -> CommandResult:
    """Print the hash of what a run reads, or one sequence of it, without training.

    The hash is the stream_sha256 that `lakh train --json` ends with after as many steps.
    """
    from lakh.tokens.digest import StreamDigest, digest_rows
    from lakh.tokens.loader import Stream
    from lakh.tokens.tokenizer import Tokenizer

    loaded = load_run(run, sets)
    opened = Stream.open(loaded.data, loaded.seed)
    if show is not None:
        rows = opened.rows(show, 1)
        ids = rows.tokens[0, : rows.lengths[0]].tolist()
        text = Tokenizer.load(opened.sources[0].tokenizer_path).decode(ids, show_special=True)
        return CommandResult(
            {"position": show, "tokens": ids, "document_starts": list(rows.starts[0]), "text": text}, text
        )
    batch, count = loaded.data.batch, loaded.train.steps if steps is None else steps
    digest = StreamDigest()
    with progress_bar() as progress:
        for step in range(count):
            rows = opened.rows(step * batch, batch)
            digest += digest_rows(step * batch, rows.tokens, rows.lengths)
            progress("reading", (step + 1) * rows.tokens.nbytes, count * rows.tokens.nbytes)
    data = {"steps": count, "sequences": digest.rows, "stream_sha256": digest.sha256, "fingerprint": opened.fingerprint}
    return CommandResult(data, table(["what", "value"], list(data.items())))
