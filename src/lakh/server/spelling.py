"""The text of tokens: together, by the tokenizer, and of one alone, by memory, where that comes to the same.

A byte-level decoder puts bytes together and reads them as UTF-8. A token whose own bytes are whole characters then adds
its own text, whatever stands before it, once that ends with a whole character too. `alone` knows such tokens' texts: a
look-up where decoding costs microseconds for every token of every row. Of other decoders (some drop a leading space)
and of tokens with parts of characters it says None.

Knows a tokenizer; knows nothing of rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["UNFINISHED", "Spelling", "adds_up"]

UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character (yet)


class Spelling:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode
        """The text of several tokens."""
        # All of them now (0.2 s for 50,000): what one tenant's answers spell makes no other's faster.
        every = range(tokenizer.vocab_size if adds_up(json.loads(tokenizer.raw)) else 0)
        texts = ((token, self.decode([token])) for token in every)
        self._known = {token: text for token, text in texts if UNFINISHED not in text}

    def alone(self, token: int) -> str | None:
        """What the token adds to text that ends with a whole character; None where that is not known."""
        return self._known.get(token)


def adds_up(description: Mapping[str, Any]) -> bool:
    """Of a tokenizer.json: it decodes to the bytes of its tokens, one after the other."""
    decoder = description.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]
