"""What a run is trained and evaluated on, opened and checked against its settings.

Needs no torch, so that a launcher can refuse a run in a moment, before its ranks have started. Fails with UserError
where the data does not fit the run, and with CorruptShard where it is damaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.errors import UserError
from lakh.spec import Run, Source
from lakh.tokens.loader import TokenSet, data_fingerprint

__all__ = ["TrainingData", "open_data"]


@dataclass(frozen=True)
class TrainingData:
    """What a run is trained and evaluated on, opened and checked against its model."""

    fingerprint: str
    tokenizer_path: str
    heldout: TokenSet


def open_data(run: Run) -> TrainingData:
    """Open every source of a run; what does not fit the model is refused here, before anything is built."""
    sources = run.data.mixture or (Source(tokens=run.data.tokens),)
    opened = [(TokenSet.open(source.tokens, "train", cache=run.data.cache), source.weight) for source in sources]
    heldout = TokenSet.open(run.data.tokens, "heldout", cache=run.data.cache)
    for tokens in (*(tokens for tokens, _ in opened), heldout):
        if tokens.vocab > run.model.vocab:
            raise UserError(
                f"model.vocab = {run.model.vocab}",
                f"is smaller than the tokenizer of {tokens.url} ({tokens.vocab})",
                f"set model.vocab = {tokens.vocab} or more, or pack with a smaller tokenizer",
            )
    for name, sets, needed in (("train", [t for t, _ in opened], run.data.batch), ("heldout", [heldout], 1)):
        there = sum(tokens.windows(run.data.sequence) for tokens in sets)
        if there < needed:
            raise UserError(
                f"{run.data.tokens}, {name}",
                f"holds {there} sequences of {run.data.sequence} tokens; {needed} are needed",
                "pack a larger corpus, or make data.batch or data.sequence smaller",
            )
    return TrainingData(data_fingerprint(opened), opened[0][0].tokenizer_path, heldout)
