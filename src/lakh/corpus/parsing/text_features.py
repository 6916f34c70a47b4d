"""Features of a text that need no parser: its normalised digest, its similarity keys, its shares.

`text_features(text, language)` computes one record; `add_text_features` fills the STREAM columns of a batch, so that
no later step reads the text again for them. The text itself stays as it was written.

    digest         SHA-256 (first 16 bytes) of language and token stream without comments and layout (lexer.py): equal
                   for texts that differ only in formatting and comments
    bands, sketch  for dedup/near.py; empty for texts of fewer than MIN_WORDS words
    comment_share, string_share, number_share
                   bytes of comments over bytes of comments and tokens; of strings and numbers over tokens

Cost: about 0.02 s per MB (bench/corpus/accuracy.py prints it). Accepts any text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lakh.corpus.dedup import minhash
from lakh.corpus.document import rows_of, with_columns
from lakh.corpus.parsing import lexer as lex
from lakh.corpus.parsing.languages import lexer_profile

__all__ = ["LexedTokens", "TextFeatures", "add_text_features", "text_features", "tokens_of"]

DIGEST_BYTES = 16
MIN_WORDS = 5
"""Shorter texts take part in exact deduplication only: a handful of shingles says little about similarity."""

REGEX_WORDS = "return typeof case in of delete void throw new else do instanceof yield await"


class TextFeatures(NamedTuple):
    """The columns of STREAM that `add_text_features` fills."""

    digest: bytes = b""
    bands: bytes = b""
    sketch: bytes = b""
    comment_share: float = 0.0
    string_share: float = 0.0
    number_share: float = 0.0


@dataclass(frozen=True)
class LexedTokens:
    """The tokens of a text, without comments: hash, kind (lex.WORD ...) and first byte of each."""

    hashes: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    stream: bytes
    """The normalised form: each token followed by a separator."""


class _LexerBuffers:
    """Scratch space that grows with the largest text; one per process."""

    def __init__(self) -> None:
        self.capacity = -1

    def fit(self, size: int) -> _LexerBuffers:
        if size > self.capacity:
            self.capacity = max(size, 1 << 14)
            places = 2 * self.capacity + 64
            self.out = np.empty(4 * self.capacity + 64, np.uint8)
            self.hashes = np.empty(places, np.int64)
            self.kinds = np.empty(places, np.uint8)
            self.starts = np.empty(places, np.int64)
            self.words = np.empty(places, np.int64)
            self.values = np.empty(places, np.uint32)
            self.stats = np.zeros(4, np.int64)
            self.bands = np.empty(minhash.BANDS, np.int64)
            self.sketch = np.empty(minhash.SKETCH, np.uint32)
        return self


_buffers = _LexerBuffers()


def text_features(text: str | bytes, language: str) -> TextFeatures:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    return _text_features(data, 0, len(data), language)


def tokens_of(text: str | bytes, language: str) -> LexedTokens:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    scratch = _LexerBuffers().fit(len(data))  # not shared: the result refers to it
    size, count = _lex(data, 0, len(data), language, scratch)
    tokens = (scratch.hashes[:count], scratch.kinds[:count], scratch.starts[:count])
    return LexedTokens(*tokens, scratch.out[:size].tobytes())


def add_text_features(batch: Any) -> Any:
    """Fill digest, bands, sketch and the shares of every row that is not dropped."""
    offsets, data = text_buffers(batch.column("text"))
    rows = []
    for row, (language, reason) in enumerate(rows_of(batch, "language", "reason")):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        known = not reason and end > begin
        rows.append(_text_features(data, begin, end, language) if known else TextFeatures())
    return with_columns(batch, **{name: [getattr(row, name) for row in rows] for name in TextFeatures._fields})


def text_buffers(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, bytes) of a text column, without a copy."""
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    data.flags.writeable = False  # like the bytes of a single text: numba compiles a kernel for each kind of array
    return offsets, data


def _text_features(data: np.ndarray, begin: int, end: int, language: str) -> TextFeatures:
    b = _buffers.fit(end - begin)
    size, count = _lex(data, begin, end, language, b)
    digest = hashlib.sha256(language.encode() + b"\0")
    digest.update(b.out[:size].data)
    made = minhash.shingles(b.hashes, b.kinds, count, b.words, b.values)
    bands = sketch = b""
    if made + minhash.SHINGLE - 1 >= MIN_WORDS:
        kept = minhash.signature(b.values, made, minhash.MULTIPLIERS, minhash.OFFSETS, b.bands, b.sketch)
        bands, sketch = b.bands.tobytes(), b.sketch[:kept].tobytes()
    comment, string, number, code = (int(value) for value in b.stats)
    return TextFeatures(
        digest.digest()[:DIGEST_BYTES],
        bands,
        sketch,
        comment / max(comment + code, 1),
        string / max(code, 1),
        number / max(code, 1),
    )


def _lex(data: np.ndarray, begin: int, end: int, language: str, b: _LexerBuffers) -> tuple[int, int]:
    """(bytes of `b.out`, tokens) of a text."""
    family, flags = lexer_profile(language)
    found: tuple[int, int] = lex.lex(
        data, begin, end, family, flags, _regex_words(), b.out, b.hashes, b.kinds, b.starts, b.stats
    )
    return found


@lru_cache(maxsize=1)
def _regex_words() -> np.ndarray:
    return np.array([lex.hash_of(word) for word in REGEX_WORDS.split()], np.int64)
