"""What a run can train on but its user should know: warnings about its data, each with what to do."""

from __future__ import annotations

from lakh.spec import Data
from lakh.tokens.loading.stream import open_data

__all__ = ["data_warnings"]

ROUNDING = 256  # vocabularies are rounded up to such multiples for speed: not worth a warning


def data_warnings(data: Data, vocab: int) -> list[str]:
    """Raises what `open_data` raises for data that cannot be used."""
    heldout = open_data(data, vocab).heldout
    found = []
    if vocab >= heldout.vocab + ROUNDING:
        found.append(
            f"model.vocab = {vocab:,}: the tokenizer of {data.tokens} has {heldout.vocab:,} entries, so "
            f"{vocab - heldout.vocab:,} rows of the embedding are never used; --set model.vocab={heldout.vocab}"
        )
    if heldout.num_documents == 1:
        found.append(
            f"{data.tokens}, heldout: is one document, whose loss says little about other code; "
            "pack with a larger --heldout"
        )
    return found
