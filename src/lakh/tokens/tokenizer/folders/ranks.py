"""A byte-level BPE from ranks of byte strings, as tiktoken has them: tokens, and no merges.

tiktoken joins the two neighbours whose joint bytes have the lowest rank, and a piece that is a token becomes it. So
every pair of tokens whose joint bytes are a token is a merge, in the order of the ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from types import MappingProxyType

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from lakh.errors import CorruptCheckpoint
from lakh.tokens.tokenizer.detokenizer import byte_characters
from lakh.tokens.tokenizer.folders.added import AGAIN

__all__ = ["byte_pairs", "read_ranks"]

MOST_BYTES = 1024  # of one token; published ones have up to 256


def read_ranks(where: str, raw: bytes) -> dict[bytes, int]:
    """Of a file with a line for each token: its bytes in base64, and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CorruptCheckpoint(where, f"line {number} is no token in base64 with its rank", AGAIN) from None
    return ranks


def byte_pairs(
    where: str, ranks: Mapping[bytes, int], pattern: str, *, first: Mapping[str, int] = MappingProxyType({})
) -> tokenizers.Tokenizer:
    """The tokenizer. The ids of `first`, special tokens, come before those of the ranks."""
    if set(ranks.values()) != set(range(len(ranks))) or not all(0 < len(token) <= MOST_BYTES for token in ranks):
        raise CorruptCheckpoint(where, "has ranks that repeat or are missing, or a token without bytes", AGAIN)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CorruptCheckpoint(where, f"has no token of the byte {missing[0]}", AGAIN)
    letters = byte_characters()
    names = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocab = {**first, **{names[token]: len(first) + rank for token, rank in ranks.items()}}
    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [split for split in splits if split[0] in ranks and split[1] in ranks]
        merges += [
            (names[left], names[right])
            for left, right in sorted(known, key=lambda split: (ranks[split[0]], ranks[split[1]]))
        ]
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        raise CorruptCheckpoint(where, f"has a pattern that is no regular expression ({error})", AGAIN) from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
    return inner
