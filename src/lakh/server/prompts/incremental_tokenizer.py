"""Tokenization line by line: known lines are looked up, so a keystroke costs only the line it changes.

The ids are exactly the tokenizer's ids of the whole text. That holds where a split changes nothing on either side:
between a visible character and the following line break, for byte-level tokenizers with GPT-2's pattern (no lookbehind,
lookahead only from white space; digits may be split off first). `can_split` checks this from the tokenizer's own file;
other tokenizers encode the whole text each time.

Lines are cached per cache space, so one tenant's prompts never speed up another's. At 5,400 characters encoding takes
0.1 ms instead of 2.5 ms.

The `tokenizers` package holds the interpreter while it encodes one text (2 s for a megabyte) and releases it while it
encodes a batch, so only short texts are encoded one by one: the engine's thread runs on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from lakh.tokens.tokenizer import Tokenizer

__all__ = ["EncodeOptions", "IncrementalTokenizer", "TooMuchNewText", "can_split", "split_lines"]

MAX_CACHED_CHARS = 1 << 22  # per generation (there are two): about 30 MB of code lines, 300 MB if each is a token
LINE_COST_CHARS = 40  # memory overhead of a cached line
MAX_LINE_CHARS = 1 << 10  # longer lines are not cached
FEW_CHARS = 256  # encoded faster one by one than in the batch call's threads
BATCH_LINES = 1 << 12  # bounds the memory of a batch call


class TooMuchNewText(Exception):
    """The text has more uncached characters than `max_new_chars`."""


class EncodeOptions(NamedTuple):
    cache_space: Hashable = ""
    """Which cached lines may be used."""
    max_new_chars: int | None = None
    """Raise TooMuchNewText instead of encoding more uncached characters than this; None sets no limit."""


DEFAULT_OPTIONS = EncodeOptions()


class IncrementalTokenizer:
    def __init__(self, tokenizer: Tokenizer, max_cached_chars: int = MAX_CACHED_CHARS) -> None:
        self._tokenizer, self._max_cached_chars = tokenizer, max_cached_chars
        description = json.loads(tokenizer.raw)
        self._can_split = can_split(description)
        # A token has at least one byte per character of its name; None where a token may stand for any text.
        self._longest = max(map(len, description["model"]["vocab"])) if self._can_split else None
        # Two generations: when the new one is full it becomes the old one, and the old one is dropped. Threads share
        # them without a lock: each access is one dict operation, and a lost race only encodes a line again.
        self._new: dict[tuple[Hashable, str], list[int]] = {}
        self._num_new_chars = 0
        self._old: dict[tuple[Hashable, str], list[int]] = {}

    def encode(self, text: str, options: EncodeOptions = DEFAULT_OPTIONS) -> list[int]:
        """The ids of a text of valid Unicode."""
        space, max_new_chars = options
        if not self._can_split:
            if max_new_chars is not None and len(text) > max_new_chars:
                raise TooMuchNewText
            return self._encode([text])[0]
        lines = split_lines(text)
        found = {line: self._cached((space, line)) for line in lines}
        missing = [line for line, ids in found.items() if ids is None]
        if max_new_chars is not None and sum(map(len, missing)) > max_new_chars:
            raise TooMuchNewText
        for start in range(0, len(missing), BATCH_LINES):
            batch = missing[start : start + BATCH_LINES]
            found.update(self._cache(space, dict(zip(batch, self._encode(batch), strict=True))))
        whole: list[int] = []
        for line in lines:
            whole += found[line] or ()
        return whole

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if sum(map(len, texts)) <= FEW_CHARS:
            return [self._tokenizer.encode(text) for text in texts]
        return self._tokenizer.encode_batch(texts)

    def min_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens, without tokenizing; 0 if there is none."""
        return 0 if self._longest is None else -(-len(text) // self._longest)

    def _cached(self, key: tuple[Hashable, str]) -> list[int] | None:
        ids = self._new.get(key)
        if ids is None and (ids := self._old.get(key)) is not None:
            self._new[key] = ids
            self._num_new_chars += len(key[1]) + LINE_COST_CHARS
        return ids

    def _cache(self, space: Hashable, encoded: dict[str, list[int]]) -> dict[str, list[int]]:
        if self._num_new_chars >= self._max_cached_chars:
            self._new, self._old, self._num_new_chars = {}, self._new, 0
        new = self._new
        for line, ids in encoded.items():
            if len(line) <= MAX_LINE_CHARS:
                new[space, line] = ids
                self._num_new_chars += len(line) + LINE_COST_CHARS
        return encoded


def split_lines(text: str) -> list[str]:
    """Split before each line break that follows a visible ASCII character."""
    pieces, begin = [], 0
    at = text.find("\n", 1)
    while at > 0:
        if "!" <= text[at - 1] <= "~":
            pieces.append(text[begin:at])
            begin = at
        at = text.find("\n", at + 1)
    pieces.append(text[begin:])
    return pieces


def can_split(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json encodes the pieces of `split_lines` independently."""
    model, steps = description.get("model") or {}, description.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    *before, last = parts or [{}]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and description.get("normalizer") is None
        # Special tokens are encoded like any text (Tokenizer); other added tokens would be matched first.
        and all(token.get("special") for token in description.get("added_tokens") or ())
        and all(part.get("type") == "Digits" for part in before)
        and last.get("type") == "ByteLevel"
        and bool(last.get("use_regex", True))
        and not last.get("add_prefix_space")
    )
