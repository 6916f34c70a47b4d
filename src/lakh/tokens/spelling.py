"""The bytes of token ids, for many texts at once: what `Tokenizer.decode` does one text at a time.

A byte-level vocabulary spells each token in characters that stand for bytes, so the bytes of a text are those of its
tokens laid end to end: one look-up in a table, by numpy. Special tokens have none. `Spelling.of` gives None where a
tokenizer.json spells in another way.

Cost: the bytes of the vocabulary; about 100 MB of text a second on one core.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np

__all__ = ["Spelling", "byte_letters"]


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary: itself, or one from 256 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


class Spelling:
    def __init__(self, spelt: Sequence[bytes]) -> None:
        """`spelt`: the bytes of each id, from 0 on."""
        self._lengths = np.array([len(part) for part in spelt], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._bytes = np.frombuffer(b"".join(spelt), np.uint8)

    @staticmethod
    def of(raw: bytes) -> Spelling | None:
        """The spelling of a tokenizer.json, or None where its decoder is another one."""
        try:
            document = json.loads(raw)
            if document["decoder"]["type"] != "ByteLevel":
                return None
            added = document["added_tokens"]
            tokens: dict[int, str] = {number: token for token, number in document["model"]["vocab"].items()}
            tokens.update((token["id"], token["content"]) for token in added)
            silent = {token["id"] for token in added if token["special"]}
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        spelt = [b""] * (max(tokens, default=-1) + 1)
        for number, token in tokens.items():
            if number not in silent:
                letters = [byte_of.get(letter, -1) for letter in token]
                spelt[number] = token.encode() if -1 in letters else bytes(letters)
        return Spelling(spelt)

    def decode(self, texts: Sequence[np.ndarray]) -> list[bytes]:
        """The bytes of each text. Ids must be in the vocabulary."""
        if not texts:
            return []
        ids = np.concatenate(texts).astype(np.int64, copy=False)
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        where = np.repeat(self._starts[ids] - (ends - lengths), lengths) + np.arange(total)
        flat = self._bytes[where].tobytes()
        edges = np.concatenate([np.zeros(1, np.int64), ends])[np.cumsum([0, *map(len, texts)])].tolist()
        return [flat[a:b] for a, b in itertools.pairwise(edges)]
