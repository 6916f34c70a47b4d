"""What is known of a text without a parser: its normalised digest, its similarity keys, its shares.

`facts(text, language)` is one record; `analyse()` is the stage that puts the records of a batch into STREAM columns,
so that no later stage has to look at the text again for them. The text itself stays as it was written.

    digest         SHA-256 (first 16 bytes) of the token stream without comments and layout (lex.py), the language
                   included: equal for texts that differ in formatting and comments alone
    bands, sketch  what near.py compares; empty for texts of fewer than MIN_WORDS words
    comment_share, string_share, number_share
                   bytes of comments over bytes of comments and tokens; of strings and numbers over tokens

Cost: about 0.02 s per MB (bench/corpus/accuracy.py prints it). Never fails on a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from lakh.corpus import lex, minhash
from lakh.corpus.document import Stage
from lakh.corpus.languages import Lexing, lexing_of

__all__ = ["DIGEST_BYTES", "MIN_WORDS", "Facts", "Tokens", "analyse", "digest_of", "facts", "tokens_of"]

DIGEST_BYTES = 16
MIN_WORDS = 5
"""Shorter texts take part in exact deduplication alone: a handful of shingles says little about likeness."""

REGEX_WORDS = "return typeof case in of delete void throw new else do instanceof yield await"


@dataclass(frozen=True)
class Facts:
    digest: bytes
    bands: bytes
    sketch: bytes
    comment_share: float
    string_share: float
    number_share: float


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text, without comments: hash, kind (lex.WORD ...) and first byte of each."""

    hashes: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    stream: bytes
    """The normalised form: tokens with a separator behind each."""


class _Buffers:
    """Scratch space that grows with the largest text seen; one per process."""

    def __init__(self) -> None:
        self.room = -1

    def fit(self, size: int) -> _Buffers:
        if size > self.room:
            self.room = max(size, 1 << 14)
            places = 2 * self.room + 64
            self.out = np.empty(4 * self.room + 64, np.uint8)
            self.hashes = np.empty(places, np.int64)
            self.kinds = np.empty(places, np.uint8)
            self.starts = np.empty(places, np.int64)
            self.words = np.empty(places, np.int64)
            self.values = np.empty(places, np.uint32)
            self.stats = np.zeros(4, np.int64)
            self.bands = np.empty(minhash.BANDS, np.int64)
            self.sketch = np.empty(minhash.SKETCH, np.uint32)
        return self


_buffers = _Buffers()


def digest_of(text: str, language: str = "") -> bytes:
    """Equal for texts that differ only in comments and layout."""
    return facts(text, language).digest


def facts(text: str | bytes, language: str) -> Facts:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    return _facts(data, 0, len(data), language, lexing_of(language))


def tokens_of(text: str | bytes, language: str) -> Tokens:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
    scratch = _Buffers().fit(len(data))  # of its own: the result refers to it
    size, count = _lex(data, 0, len(data), lexing_of(language), scratch)
    return Tokens(scratch.hashes[:count], scratch.kinds[:count], scratch.starts[:count], scratch.out[:size].tobytes())


def analyse() -> Stage:
    """The stage that fills digest, bands, sketch and the shares of every row that is still alive."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield _analyse(batch)

    return stage


NOTHING = Facts(b"", b"", b"", 0.0, 0.0, 0.0)


def _analyse(batch: Any) -> Any:
    texts = batch.column("text")
    offsets, data = text_buffers(texts)
    languages, reasons = batch.column("language").to_pylist(), batch.column("reason").to_pylist()
    rows = []
    for row, (language, reason) in enumerate(zip(languages, reasons, strict=True)):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        known = not reason and end > begin
        rows.append(_facts(data, begin, end, language, lexing_of(language)) if known else NOTHING)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in ("digest", "bands", "sketch", "comment_share", "string_share", "number_share"):
        columns[name] = pa.array([getattr(row, name) for row in rows], batch.schema.field(name).type)
    return pa.record_batch([columns[name] for name in batch.schema.names], schema=batch.schema)


def text_buffers(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, bytes) of a text column, without a copy."""
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    data.flags.writeable = False  # as the bytes of a single text are: a kernel is compiled for each kind of array
    return offsets, data


def _facts(data: np.ndarray, begin: int, end: int, language: str, lexing: Lexing) -> Facts:
    b = _buffers.fit(end - begin)
    size, count = _lex(data, begin, end, lexing, b)
    digest = hashlib.sha256(language.encode() + b"\0")
    digest.update(b.out[:size].data)
    made = minhash.shingles(b.hashes, b.kinds, count, b.words, b.values)
    bands = sketch = b""
    if made + minhash.SHINGLE - 1 >= MIN_WORDS:
        kept = minhash.signature(b.values, made, minhash.MULTIPLIERS, minhash.OFFSETS, b.bands, b.sketch)
        bands, sketch = b.bands.tobytes(), b.sketch[:kept].tobytes()
    comment, string, number, code = (int(value) for value in b.stats)
    return Facts(
        digest.digest()[:DIGEST_BYTES],
        bands,
        sketch,
        comment / max(comment + code, 1),
        string / max(code, 1),
        number / max(code, 1),
    )


def _lex(data: np.ndarray, begin: int, end: int, lexing: Lexing, b: _Buffers) -> tuple[int, int]:
    size, count = lex.lex(
        data, begin, end, lexing.family, lexing.flags, _regex_words(), b.out, b.hashes, b.kinds, b.starts, b.stats
    )
    return int(size), int(count)


@lru_cache(maxsize=1)
def _regex_words() -> np.ndarray:
    words = [np.frombuffer(word.encode(), np.uint8) for word in REGEX_WORDS.split()]
    return np.array([lex._hash(word, 0, len(word)) for word in words], np.int64)
