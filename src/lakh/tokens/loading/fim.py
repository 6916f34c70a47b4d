"""Fill-in-the-middle (FIM): split documents at characters into three parts and reorder them while reading.

    PSM   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle
    SPM   <|fim_prefix|><|fim_suffix|> suffix <|fim_middle|> prefix middle

The split points lie between characters, not tokens, like a cursor in an editor; the three parts are encoded again
(arXiv 2207.14255). A hash of (seed, epoch, location of the text) decides whether and where to split, so the same
sequence index always gives the same tokens. A text that begins or ends inside a character is not transformed.

Documents of a repository are transformed file by file (`<|file_sep|>` separates them), and the path on the first line
of a file stays in the prefix. Texts are transformed in batches: half of all data is decoded and encoded again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lakh.errors import UserError
from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer.detokenizer import BatchDetokenizer

if TYPE_CHECKING:
    from lakh.tokens.tokenizer.fast_encoder import FastEncoder

__all__ = ["FimSegment", "FimTransform", "reserved_tokens"]

MIN_CHARACTERS = 8  # shorter texts are not transformed
FAST_FROM_CHARACTERS = 500_000  # from here on, compiling the fast encoder pays off


def reserved_tokens(sequence: int, rate: float) -> int:
    """1 in 64 tokens: a transformed document needs 3 special tokens, and 2 or 3 tokens for words that were split."""
    return max(8, sequence // 64) if rate > 0 else 0


@dataclass(frozen=True, slots=True)
class FimSegment:
    """A text that may be transformed."""

    ids: np.ndarray
    key: str
    """Its location, which together with the seed determines the transformation."""
    is_file: bool
    """The first line is the path of a file."""


class FimTransform:
    def __init__(self, tokenizer: Tokenizer, rate: float, spm: float, seed: int) -> None:
        self.tokenizer, self.rate, self.spm, self.seed = tokenizer, rate, spm, seed
        if tokenizer.fim is None:
            found = "the tokenizer has no fill-in-the-middle tokens"
            raise UserError("data.fim_rate", found, "set data.fim_rate = 0, or use a tokenizer of lakh tokens train")
        # Without its mark, a token set cannot hold repositories: no id is -1.
        marks = [tokenizer.find(f"<|{name}|>") for name in ("repo_name", "file_sep")]
        self._edges = [tokenizer.eot, *(-1 if mark is None else mark for mark in marks)]
        prefix, suffix, middle, self._has_spm = tokenizer.fim
        self._prefix, self._suffix = np.array([prefix]), np.array([suffix])
        self._middle = None if middle is None else np.array([middle])
        self._detokenizer = BatchDetokenizer.of(tokenizer.raw)
        self._fast: FastEncoder | None = None
        self._encoded = 0

    def segments(self, ids: np.ndarray) -> list[tuple[int, int, bool]]:
        """(start, stop, is a file of a repository) of the texts in a span that are transformed separately."""
        eot, name, file = self._edges
        stop = len(ids) - 1 if len(ids) and ids[-1] == eot else len(ids)
        edges = np.flatnonzero(ids[:stop] == file)
        first = int(edges[0]) if len(edges) else stop
        head = [] if stop == 0 or ids[0] == name else [(0, first, False)]
        bounds = [*edges.tolist(), stop]
        return head + [(a + 1, b, True) for a, b in itertools.pairwise(bounds)]

    def transform(self, segments: Sequence[FimSegment]) -> list[np.ndarray | None]:
        """The ids of each text in FIM form, or None if it is not transformed."""
        result: list[np.ndarray | None] = [None] * len(segments)
        selected = [(place, self._random(segment.key)) for place, segment in enumerate(segments)]
        selected = [(place, numbers) for place, numbers in selected if numbers[0] < self.rate]
        texts = self._decode([segments[place].ids for place, _ in selected])
        split: list[tuple[int, bool]] = []  # place, is SPM
        parts: list[str] = []
        for (place, (_, form, *cuts)), text in zip(selected, texts, strict=True):
            first = text.find("\n") + 1 if segments[place].is_file else 0
            if "\ufffd" in text or len(text) - first < MIN_CHARACTERS:
                continue
            low, high = sorted(first + int(cut * (len(text) + 1 - first)) for cut in cuts)
            parts += [text[:low], text[low:high], text[high:]]
            split.append((place, form < self.spm))
        encoded = iter(self._encode(parts))
        for place, is_spm in split:
            prefix, middle, suffix = next(encoded), next(encoded), next(encoded)
            order: tuple[np.ndarray, ...]
            if self._middle is None:
                order = (self._suffix, suffix, self._prefix, prefix, middle)
            elif is_spm and self._has_spm:
                order = (self._prefix, self._suffix, suffix, self._middle, prefix, middle)
            else:
                order = (self._prefix, prefix, self._suffix, suffix, self._middle, middle)
            result[place] = np.concatenate(order).astype(segments[place].ids.dtype)
        return result

    def _random(self, key: str) -> tuple[float, ...]:
        """Four numbers from 0 to 1: whether to transform, the form, and two split points."""
        digest = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=32, person=b"lakh-fim").digest()
        return tuple(int.from_bytes(digest[i : i + 8], "little") / 2**64 for i in (0, 8, 16, 24))

    def _decode(self, texts: Sequence[np.ndarray]) -> list[str]:
        if self._detokenizer is None:
            return [self.tokenizer.decode(ids.tolist()) for ids in texts]
        return [raw.decode(errors="replace") for raw in self._detokenizer.decode(texts)]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """Both encoders give the same ids; the fast one needs seconds to compile."""
        before, self._encoded = self._encoded, self._encoded + sum(map(len, texts))
        if before < FAST_FROM_CHARACTERS <= self._encoded:
            from lakh.tokens.tokenizer.fast_encoder import FastEncoder  # imports numba, which takes a second

            self._fast = FastEncoder.of(self.tokenizer.raw)
        if self._fast is None:
            return [np.array(self.tokenizer.encode(text), np.int32) for text in texts]
        found = self._fast.encode([text.encode() for text in texts])
        return [
            ids if ids is not None else np.array(self.tokenizer.encode(text), np.int32)
            for ids, text in zip(found, texts, strict=True)
        ]
