"""Fill-in-the-middle, made as the data is read: a document is cut in three at characters and put into another order.

    PSM   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle
    SPM   <|fim_prefix|><|fim_suffix|> suffix <|fim_middle|> prefix middle

Cuts fall between characters, not tokens, because the cursor of a person does; the three parts are encoded anew
(arXiv 2207.14255). Whether, where and in which form is decided by a hash of (seed, epoch, where the text lies), so the
same sequence index always shows the same tokens. A text that was cut inside a character, and so cannot be read, stays
as it is.

A piece of a repository is turned file by file: `<|file_sep|>` parts them, and the path on a file's first line stays in
the prefix.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

import numpy as np

from lakh.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lakh.tokens.fast import FastEncoder

__all__ = ["Fim", "room_for"]

MIN_CHARACTERS = 8  # below, there is nothing to fill in
FAST_FROM_CHARACTERS = 2_000_000  # compiling the fast encoder pays from here on


def room_for(sequence: int, rate: float) -> int:
    """Tokens that a row keeps free for the marks of FIM, and for words that a cut breaks: 1 in 64.

    One transformed document takes 3 marks and 2 or 3 tokens for broken words.
    """
    return max(8, sequence // 64) if rate > 0 else 0


class Fim:
    def __init__(self, tokenizer: Tokenizer, rate: float, spm: float, seed: int) -> None:
        self.tokenizer, self.rate, self.spm, self.seed = tokenizer, rate, spm, seed
        self._marks = [tokenizer.special(f"<|{word}|>") for word in ("endoftext", "repo_name", "file_sep")]
        self._fast: FastEncoder | None = None
        self._encoded = 0

    def segments(self, ids: np.ndarray) -> list[tuple[int, int, bool]]:
        """(start, stop, is a file of a repository) of the parts of a piece that are turned by themselves."""
        eot, name, file = self._marks
        stop = len(ids) - 1 if len(ids) and ids[-1] == eot else len(ids)
        edges = np.flatnonzero(ids[:stop] == file)
        first = int(edges[0]) if len(edges) else stop
        head = [] if stop == 0 or ids[0] == name else [(0, first, False)]
        bounds = [*edges.tolist(), stop]
        return head + [(a + 1, b, True) for a, b in itertools.pairwise(bounds)]

    def turn(self, ids: np.ndarray, key: str, *, is_file: bool) -> np.ndarray | None:
        """The ids of a text in FIM form, or None where it stays as it is."""
        words = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=32, person=b"lakh-fim").digest()
        wanted, form, cut_1, cut_2 = (int.from_bytes(words[i : i + 8], "little") / 2**64 for i in (0, 8, 16, 24))
        if wanted >= self.rate:
            return None
        text = self.tokenizer.decode(ids.tolist())
        first = text.find("\n") + 1 if is_file else 0
        if "\ufffd" in text or len(text) - first < MIN_CHARACTERS:
            return None
        low, high = sorted(first + int(cut * (len(text) + 1 - first)) for cut in (cut_1, cut_2))
        prefix, middle, suffix = self._encode([text[:low], text[low:high], text[high:]])
        t = self.tokenizer
        if form < self.spm:
            turned = [t.fim_prefix, t.fim_suffix, *suffix, t.fim_middle, *prefix, *middle]
        else:
            turned = [t.fim_prefix, *prefix, t.fim_suffix, *suffix, t.fim_middle, *middle]
        return np.asarray(turned, ids.dtype)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """The same ids from either encoder: which one is only a matter of speed."""
        before, self._encoded = self._encoded, self._encoded + sum(map(len, texts))
        if before < FAST_FROM_CHARACTERS <= self._encoded:
            from lakh.tokens.fast import FastEncoder  # numba: a second that a run without FIM does not pay

            self._fast = FastEncoder.of(self.tokenizer.raw)
        if self._fast is None:
            return [self.tokenizer.encode(text) for text in texts]
        found = self._fast.encode([text.encode() for text in texts])
        return [
            ids.tolist() if ids is not None else self.tokenizer.encode(text)
            for ids, text in zip(found, texts, strict=True)
        ]
