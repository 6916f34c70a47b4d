"""Features of a text that need no parser: its normalised digest, its similarity keys, its shares.

`text_features(text, language)` computes one record; `text_features_filter` fills the STREAM columns of a batch, so that
no later step reads the text again for them. The text itself stays as it was written.

    digest         SHA-256 (first 16 bytes) of language and normal form (normal_form/): equal for texts that
                   differ only in formatting and comments
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
from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.document import Filter, rows_of, with_columns
from lakh.corpus.parsing import lexer as lex
from lakh.corpus.parsing.languages import lexer_profile
from lakh.corpus.parsing.normal_form.precedence import word_precedences
from lakh.corpus.parsing.normal_form.redundant_tokens import mark_redundant
from lakh.corpus.parsing.normal_form.writer import write_normal_form
from lakh.corpus.parsing.renamed_shingles import renamed_shingles, reserved_words
from lakh.corpus.parsing.table_driven.groups import mark_redundant_by_table
from lakh.corpus.parsing.table_driven.lexer import lex_table
from lakh.corpus.parsing.table_driven.syntax import table_syntax
from lakh.corpus.parsing.table_driven.writer import write_by_table

__all__ = ["LexedTokens", "TextFeatures", "text_features", "text_features_filter", "text_mask", "tokens_of"]

DIGEST_BYTES = 16
MIN_WORDS = 5
"""Shorter texts take part in exact deduplication only: a handful of shingles says little about similarity."""

MIN_RENAMED = 64
"""Shingles without names that a text needs: short texts of the same structure, as lists of imports, are no copies."""
USUAL = NearDedupSettings()
REGEX_WORDS = "return typeof case in of delete void throw new else do instanceof yield await"


class TextFeatures(NamedTuple):
    """The columns of STREAM that `text_features_filter` fills."""

    digest: bytes = b""
    bands: bytes = b""
    sketch: bytes = b""
    comment_share: float = 0.0
    string_share: float = 0.0
    number_share: float = 0.0


@dataclass(frozen=True)
class LexedTokens:
    """The tokens of a text in normal form: hash, kind (lex.WORD ...) and first byte of each."""

    hashes: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    stream: bytes
    """The normal form: each token followed by a separator."""


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
            self.raw = (np.empty(places, np.int64), np.empty(places, np.uint8), np.empty(places, np.int64))
            self.ends = np.empty(places, np.int64)
            self.drop = np.empty(places, np.uint8)
            self.words = np.empty(places, np.int64)
            self.values = np.empty(places, np.uint32)
            self.stats = np.zeros(4, np.int64)
            self.bands = np.empty(minhash.MAX_BANDS, np.int64)
            self.sketch = np.empty(minhash.SKETCH, np.uint32)
        return self


_buffers = _LexerBuffers()


def text_features(text: str | bytes, language: str, near: NearDedupSettings = USUAL) -> TextFeatures:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    return _text_features(data, 0, len(data), language, near)


def tokens_of(text: str | bytes, language: str) -> LexedTokens:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    scratch = _LexerBuffers().fit(len(data))  # not shared: the result refers to it
    size, count = _lex(data, 0, len(data), language, scratch)
    tokens = (scratch.hashes[:count], scratch.kinds[:count], scratch.starts[:count])
    return LexedTokens(*tokens, scratch.out[:size].tobytes())


def text_mask(data: bytes, language: str) -> np.ndarray:
    """Per byte: whether it is in a comment or inside a string, not in code."""
    array = np.frombuffer(data, np.uint8)
    scratch = _LexerBuffers().fit(len(array))
    count = _raw_tokens(array, 0, len(array), language, scratch)
    _, kinds, starts = (column[:count] for column in scratch.raw)
    steps = np.zeros(len(array) + 1, np.int64)
    is_string = kinds == lex.STRING
    for begin, end in ((starts, scratch.ends[:count]), (starts[is_string] + 1, scratch.ends[:count][is_string] - 1)):
        sign = 1 if begin is starts else -1  # the inside of a string is text, its quotes are code
        np.add.at(steps, begin, sign)
        np.add.at(steps, np.maximum(begin, end), -sign)
    mask: np.ndarray = np.cumsum(steps[:-1]) <= 0
    return mask


def text_features_filter(near: NearDedupSettings) -> Filter:
    """Fill digest, bands, sketch and the shares of every row that is not dropped."""

    def apply(batch: Any) -> Any:
        offsets, data = text_buffers(batch.column("text"))
        rows = []
        for row, (language, reason) in enumerate(rows_of(batch, "language", "reason")):
            begin, end = int(offsets[row]), int(offsets[row + 1])
            known = not reason and end > begin
            rows.append(_text_features(data, begin, end, language, near) if known else TextFeatures())
        return with_columns(batch, **{name: [getattr(row, name) for row in rows] for name in TextFeatures._fields})

    return apply


def text_buffers(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, bytes) of a text column, without a copy."""
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    data.flags.writeable = False  # like the bytes of a single text: numba compiles a kernel for each kind of array
    return offsets, data


def _text_features(data: np.ndarray, begin: int, end: int, language: str, near: NearDedupSettings) -> TextFeatures:
    b = _buffers.fit(end - begin)
    size, count = _lex(data, begin, end, language, b)
    digest = hashlib.sha256(language.encode() + b"\0")
    digest.update(b.out[:size].data)
    if near.ignore_names:
        made = renamed_shingles(b.hashes, b.kinds, count, reserved_words(), b.words, b.values)
        is_long_enough = made >= MIN_RENAMED
    else:
        made = minhash.shingles(b.hashes, b.kinds, count, b.words, b.values)
        is_long_enough = made + minhash.SHINGLE - 1 >= MIN_WORDS
    bands = sketch = b""
    if is_long_enough:
        shape = minhash.fit_bands(near.threshold)
        seeds = (minhash.MULTIPLIERS, minhash.OFFSETS)
        kept = minhash.signature(b.values, made, *seeds, shape.bands, shape.rows, b.bands, b.sketch)
        bands, sketch = b.bands[: shape.bands].tobytes(), b.sketch[:kept].tobytes()
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
    """(bytes of `b.out`, tokens) of a text in normal form."""
    family, flags = lexer_profile(language)
    count = _raw_tokens(data, begin, end, language, b)
    tokens, written = (*b.raw, b.ends), (b.out, b.hashes, b.kinds, b.starts)
    found: tuple[int, int]
    if family == lex.TABLE:
        rules, _, bytes_of, _, known, roles = table_syntax(language)
        mark_redundant_by_table(data, count, *tokens, rules, bytes_of, known, roles, b.words, b.drop)
        found = write_by_table(data, end, count, *tokens, rules, bytes_of, b.drop, *written)
    else:
        mark_redundant(data, end, count, *tokens, family, flags, *word_precedences(family, flags), b.drop)
        found = write_normal_form(data, count, *tokens, family, flags, b.drop, *written)
    return found


def _raw_tokens(data: np.ndarray, begin: int, end: int, language: str, b: _LexerBuffers) -> int:
    """The number of tokens of a text, which are in `b.raw` and `b.ends`; table-driven ones have roles in `b.words`."""
    family, flags = lexer_profile(language)
    tokens = (*b.raw, b.ends, b.stats)
    if family == lex.TABLE:
        return int(lex_table(data, begin, end, *table_syntax(language), *tokens, b.words))
    return int(lex.lex(data, begin, end, family, flags, _regex_words(), *tokens))


@lru_cache(maxsize=1)
def _regex_words() -> np.ndarray:
    return np.array([lex.hash_of(word) for word in REGEX_WORDS.split()], np.int64)
