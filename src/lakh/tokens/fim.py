"""Fill-in-the-middle, made as the data is read: a document is cut in three at characters and put into another order.

    PSM   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle
    SPM   <|fim_prefix|><|fim_suffix|> suffix <|fim_middle|> prefix middle

Cuts fall between characters, not tokens, because the cursor of a person does; the three parts are encoded anew
(arXiv 2207.14255). Whether, where and in which form is decided by a hash of (seed, epoch, where the text lies), so the
same sequence index always shows the same tokens. A text that was cut inside a character, and so cannot be read, stays
as it is.

A piece of a repository is turned file by file: `<|file_sep|>` parts them, and the path on a file's first line stays in
the prefix.

Texts are turned many at a time: a run decodes and encodes half of all its data again, which must keep up with GPUs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lakh.tokens.spelling import Spelling
from lakh.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lakh.tokens.fast import FastEncoder

__all__ = ["Fim", "Segment", "room_for"]

MIN_CHARACTERS = 8  # below, there is nothing to fill in
FAST_FROM_CHARACTERS = 500_000  # compiling the fast encoder pays from here on


def room_for(sequence: int, rate: float) -> int:
    """Tokens that a row keeps free for the marks of FIM, and for words that a cut breaks: 1 in 64.

    One transformed document takes 3 marks and 2 or 3 tokens for broken words.
    """
    return max(8, sequence // 64) if rate > 0 else 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A text that may be turned."""

    ids: np.ndarray
    key: str
    """Where it lies: decides, with the seed, what happens to it."""
    is_file: bool
    """Its first line is the path of a file."""


class Fim:
    def __init__(self, tokenizer: Tokenizer, rate: float, spm: float, seed: int) -> None:
        self.tokenizer, self.rate, self.spm, self.seed = tokenizer, rate, spm, seed
        self._edges = [tokenizer.special(f"<|{word}|>") for word in ("endoftext", "repo_name", "file_sep")]
        self._prefix, self._suffix, self._middle = (
            np.array([mark]) for mark in (tokenizer.fim_prefix, tokenizer.fim_suffix, tokenizer.fim_middle)
        )
        self._spelling = Spelling.of(tokenizer.raw)
        self._fast: FastEncoder | None = None
        self._encoded = 0

    def segments(self, ids: np.ndarray) -> list[tuple[int, int, bool]]:
        """(start, stop, is a file of a repository) of the parts of a piece that are turned by themselves."""
        eot, name, file = self._edges
        stop = len(ids) - 1 if len(ids) and ids[-1] == eot else len(ids)
        edges = np.flatnonzero(ids[:stop] == file)
        first = int(edges[0]) if len(edges) else stop
        head = [] if stop == 0 or ids[0] == name else [(0, first, False)]
        bounds = [*edges.tolist(), stop]
        return head + [(a + 1, b, True) for a, b in itertools.pairwise(bounds)]

    def turn(self, segments: Sequence[Segment]) -> list[np.ndarray | None]:
        """The ids of each text in FIM form, or None where it stays as it is."""
        result: list[np.ndarray | None] = [None] * len(segments)
        drawn = [(place, self._draw(segment.key)) for place, segment in enumerate(segments)]
        drawn = [(place, numbers) for place, numbers in drawn if numbers[0] < self.rate]
        texts = self._decode([segments[place].ids for place, _ in drawn])
        turned: list[tuple[int, bool]] = []  # place, is SPM
        parts: list[str] = []
        for (place, (_, form, *cuts)), text in zip(drawn, texts, strict=True):
            first = text.find("\n") + 1 if segments[place].is_file else 0
            if "\ufffd" in text or len(text) - first < MIN_CHARACTERS:
                continue
            low, high = sorted(first + int(cut * (len(text) + 1 - first)) for cut in cuts)
            parts += [text[:low], text[low:high], text[high:]]
            turned.append((place, form < self.spm))
        encoded = iter(self._encode(parts))
        for place, is_spm in turned:
            prefix, middle, suffix = next(encoded), next(encoded), next(encoded)
            if is_spm:
                order = (self._prefix, self._suffix, suffix, self._middle, prefix, middle)
            else:
                order = (self._prefix, prefix, self._suffix, suffix, self._middle, middle)
            result[place] = np.concatenate(order).astype(segments[place].ids.dtype)
        return result

    def _draw(self, key: str) -> tuple[float, ...]:
        """Four numbers from 0 to 1: whether, in which form, and where the cuts fall."""
        words = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=32, person=b"lakh-fim").digest()
        return tuple(int.from_bytes(words[i : i + 8], "little") / 2**64 for i in (0, 8, 16, 24))

    def _decode(self, texts: Sequence[np.ndarray]) -> list[str]:
        if self._spelling is None:
            return [self.tokenizer.decode(ids.tolist()) for ids in texts]
        return [raw.decode(errors="replace") for raw in self._spelling.decode(texts)]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """The same ids from either encoder: which one is only a matter of speed."""
        before, self._encoded = self._encoded, self._encoded + sum(map(len, texts))
        if before < FAST_FROM_CHARACTERS <= self._encoded:
            from lakh.tokens.fast import FastEncoder  # numba: a second that a run without FIM does not pay

            self._fast = FastEncoder.of(self.tokenizer.raw)
        if self._fast is None:
            return [np.array(self.tokenizer.encode(text), np.int32) for text in texts]
        found = self._fast.encode([text.encode() for text in texts])
        return [
            ids if ids is not None else np.array(self.tokenizer.encode(text), np.int32)
            for ids, text in zip(found, texts, strict=True)
        ]
