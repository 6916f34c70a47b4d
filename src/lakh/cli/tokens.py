"""lakh tokens: train a tokenizer, pack a corpus, inspect the training stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, print_result, print_warning, set_option, table
from lakh.cli.progress import progress_bar
from lakh.spec import load_run

if TYPE_CHECKING:
    from lakh.tokens.dataset.packing import Ordering

__all__ = ["SAMPLE_BYTES", "tokens"]

SAMPLE_BYTES = 32_000_000  # a test holds it to lakh.tokens.tokenizer.training


@click.group(cls=HintingGroup)
def tokens() -> None:
    """Train a tokenizer, pack a corpus into token shards."""


@tokens.command()
@click.argument("corpus")
@click.option("--out", required=True, metavar="DIR", help="Folder for the tokenizer.")
@click.option("--vocab", default=4096, show_default=True, help="Size of the vocabulary, including special tokens.")
@click.option("--sample-bytes", default=SAMPLE_BYTES, show_default=True, help="Bytes of text to train on.")
@click.option("--force", is_flag=True, help="Replace a tokenizer of another corpus or size.")
@print_result
def train(corpus: str, out: str, vocab: int, sample_bytes: int, force: bool) -> CommandResult:
    """Train a byte-level BPE tokenizer on a corpus."""
    from lakh.tokens.training_process import train_in_child

    with progress_bar() as progress:
        made = train_in_child(corpus, out, vocab=vocab, sample_bytes=sample_bytes, force=force, progress=progress)
    verb = "already trained, reused" if made["reused"] else "trained"
    text = f"{out}: {verb}; {made['vocab']:,} tokens, trained on {made['sampled_bytes'] / 1e6:,.1f} MB"
    if made["vocab"] < made["vocab_asked"]:
        text += f"\n{made['vocab_asked']:,} were requested: the sample has no more repeated pairs"
    return CommandResult(made, text)


@tokens.command()
@click.argument("corpus")
@click.option("--tokenizer", "tokenizer_path", required=True, metavar="DIR", help="Made by `lakh tokens train`.")
@click.option("--out", required=True, metavar="DIR", help="Folder for the token shards.")
@click.option("--heldout", default=0.02, show_default=True, help="Share of documents held out from training.")
@click.option(
    "--order",
    type=click.Choice(["document", "repository"]),
    default="document",
    show_default=True,
    help="Shuffle files, or keep the files of a repository together in import order.",
)
@click.option("--force", is_flag=True, help="Replace tokens of another corpus, tokenizer or share.")
@print_result
def pack(corpus: str, tokenizer_path: str, out: str, heldout: float, order: Ordering, force: bool) -> CommandResult:
    """Encode a corpus into token shards for training and evaluation.

    DIR may be a URL such as s3://bucket/tokens, which training reads in blocks through a local cache.
    """
    from lakh.tokens.dataset import packing

    with progress_bar() as progress:
        made = packing.pack(
            corpus, tokenizer_path, out, heldout_fraction=heldout, order=order, force=force, progress=progress
        )
    data = made.as_dict()
    if data["splits"]["heldout"]["documents"] == 1:
        print_warning(f"{out}, heldout: is one document; its loss says little about other code: use a larger --heldout")
    rows = [(name, split["documents"], split["tokens"], split["shards"]) for name, split in data["splits"].items()]
    head = (
        f"{out}: {'already packed, reused' if made.reused else 'packed'}, {data['bytes_per_token']:.2f} bytes per token"
    )
    return CommandResult(data, table(["split", "documents", "tokens", "shards"], rows, title=head))


@tokens.command()
@click.argument("run")
@set_option
@click.option("--steps", type=click.IntRange(min=0), help="Number of steps to hash.  [default: the whole run]")
@click.option("--show", type=click.IntRange(min=0), help="Print the sequence at this position.")
@print_result
def stream(run: str, sets: tuple[str, ...], steps: int | None, show: int | None) -> CommandResult:
    """Print the hash of a run's training stream, or one sequence of it, without training.

    The hash equals stream_sha256 in the output of `lakh train --json` after the same number of steps.
    """
    from lakh.tokens.loading.digest import StreamDigest, digest_sequences
    from lakh.tokens.loading.stream import TokenStream
    from lakh.tokens.tokenizer import Tokenizer

    loaded = load_run(run, sets)
    opened = TokenStream(loaded.data, loaded.seed)
    if show is not None:
        rows = opened.read_range(show, 1)
        ids = rows.tokens[0, : rows.lengths[0]].tolist()
        text = Tokenizer.load(opened.sources[0].tokenizer_path).decode(ids, show_special=True)
        return CommandResult(
            {"position": show, "tokens": ids, "document_starts": list(rows.starts[0]), "text": text}, text
        )
    batch, count = loaded.data.batch, loaded.train.steps if steps is None else steps
    digest = StreamDigest()
    with progress_bar() as progress:
        for step in range(count):
            rows = opened.read_range(step * batch, batch)
            digest += digest_sequences(step * batch, rows.tokens, rows.lengths)
            progress("reading", (step + 1) * rows.tokens.nbytes, count * rows.tokens.nbytes)
    data = {
        "steps": count,
        "sequences": digest.sequences,
        "stream_sha256": digest.sha256,
        "fingerprint": opened.fingerprint,
    }
    return CommandResult(data, table(["what", "value"], list(data.items())))
