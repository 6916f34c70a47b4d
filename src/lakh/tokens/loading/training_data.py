"""Open the training and held-out data of a run and check it against the run's settings.

Independent of torch, so that the launcher can reject a run before it starts ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.errors import UserError
from lakh.spec import Data
from lakh.tokens.loading.stream import TokenSet, data_fingerprint, open_sources

__all__ = ["TrainingData", "open_data"]


@dataclass(frozen=True)
class TrainingData:
    """The data of a run."""

    fingerprint: str
    tokenizer_path: str
    heldout: TokenSet


def open_data(data: Data, vocab: int) -> TrainingData:
    """Open every source of a run. Raises UserError if the data does not fit the settings or the vocabulary."""
    opened = open_sources(data)
    heldout = TokenSet.open(data.tokens, "heldout", cache=data.cache)
    for tokens in (*(tokens for tokens, _ in opened), heldout):
        if tokens.vocab > vocab:
            raise UserError(
                f"model.vocab = {vocab}",
                f"is smaller than the tokenizer of {tokens.url} ({tokens.vocab})",
                f"set model.vocab = {tokens.vocab} or more, or pack with a smaller tokenizer",
            )
    for name, sets, needed in (("train", [t for t, _ in opened], data.batch), ("heldout", [heldout], 1)):
        available = sum(tokens.count_sequences(data.sequence) for tokens in sets)
        if available < needed:
            raise UserError(
                f"{data.tokens}, {name}",
                f"holds {available} sequences of {data.sequence} tokens; {needed} are needed",
                "pack a larger corpus, or make data.batch or data.sequence smaller",
            )
    return TrainingData(data_fingerprint(opened), opened[0][0].tokenizer_path, heldout)
