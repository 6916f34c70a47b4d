"""Text to ids, line by line: lines that were read before are looked up, so a keystroke costs the line it changes.

The ids are exactly the tokenizer's own for the whole text. That holds where a cut changes nothing on either side of it:
between a visible character and the line break after it, for tokenizers that look at a text as GPT-2's does (byte-level,
its pattern has no look behind, and looks ahead only from white space; digits may be split off before). `may_cut` says
whether a tokenizer is such a one, from its own file; for any other the whole text is read each time.

What one space (a tenant's) has read never makes another's faster. Costs a look-up for each line; at 5,400 characters
0.1 ms where the whole text takes 2.5. Knows a tokenizer; knows nothing of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Lines", "Reading", "Unread", "cut", "may_cut"]

MAX_KEPT = 1 << 22  # characters remembered, twice: about 30 MB where lines are code's, 300 where each is a token
LINE_COST = 40  # characters' worth of memory that a line takes beside its own
MAX_CHARS = 1 << 10  # of a line that is remembered
FEW = 4  # lines that are sooner read than handed to threads
AT_ONCE = 1 << 12  # lines that are handed over together: bounds the memory for it


class Unread(Exception):
    """There is more new text than was to be read at once."""


class Reading(NamedTuple):
    """How a text may be read."""

    space: Hashable = ""
    """Whose remembered lines it may use."""
    most_new: int | None = None
    """Raise Unread rather than read more new characters than these; None reads any number."""


ANY = Reading()


class Lines:
    def __init__(self, tokenizer: Tokenizer, max_kept: int = MAX_KEPT) -> None:
        self._tokenizer, self._max_kept = tokenizer, max_kept
        description = json.loads(tokenizer.raw)
        self._may_cut = may_cut(description)
        # A token spells at least a byte for each character of its name; None where one may stand for any text.
        self._longest = max(map(len, description["model"]["vocab"])) if self._may_cut else None
        # Two generations: when the young are many they become the old, and the old are forgotten. Several threads may
        # read and write: each step is one of a dict, and what is lost by a race is only read again.
        self._young: dict[tuple[Hashable, str], list[int]] = {}
        self._num_young = 0  # characters
        self._old: dict[tuple[Hashable, str], list[int]] = {}

    def encode(self, text: str, reading: Reading = ANY) -> list[int]:
        """The ids of a text of whole characters."""
        space, most_new = reading
        if not self._may_cut:
            if most_new is not None and len(text) > most_new:
                raise Unread
            return self._tokenizer.encode(text)
        lines = cut(text)
        found = {line: self._known((space, line)) for line in lines}
        new = [line for line, ids in found.items() if ids is None]
        if most_new is not None and sum(map(len, new)) > most_new:
            raise Unread
        for start in range(0, len(new), AT_ONCE):
            some = new[start : start + AT_ONCE]
            read = self._tokenizer.encode_batch(some) if len(some) > FEW else map(self._tokenizer.encode, some)
            found.update(self._remember(space, dict(zip(some, read, strict=True))))
        whole: list[int] = []
        for line in lines:
            whole += found[line] or ()
        return whole

    def least_tokens(self, text: str) -> int:
        """So many the text has for sure, known without reading it; 0 where nothing is known."""
        return 0 if self._longest is None else -(-len(text) // self._longest)

    def _known(self, key: tuple[Hashable, str]) -> list[int] | None:
        ids = self._young.get(key)
        if ids is None and (ids := self._old.get(key)) is not None:
            self._young[key] = ids
            self._num_young += len(key[1]) + LINE_COST
        return ids

    def _remember(self, space: Hashable, read: dict[str, list[int]]) -> dict[str, list[int]]:
        if self._num_young >= self._max_kept:
            self._young, self._old, self._num_young = {}, self._young, 0
        young = self._young
        for line, ids in read.items():
            if len(line) <= MAX_CHARS:
                young[space, line] = ids
                self._num_young += len(line) + LINE_COST
        return read


def cut(text: str) -> list[str]:
    """Pieces that end with a visible ASCII character and begin with a line break, but for the last and the first."""
    pieces, begin = [], 0
    at = text.find("\n", 1)
    while at > 0:
        if "!" <= text[at - 1] <= "~":
            pieces.append(text[begin:at])
            begin = at
        at = text.find("\n", at + 1)
    pieces.append(text[begin:])
    return pieces


def may_cut(description: Mapping[str, Any]) -> bool:
    """Of a tokenizer.json: nothing in it looks across such a cut."""
    model, steps = description.get("model") or {}, description.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    *before, last = parts or [{}]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and description.get("normalizer") is None
        # Special ones are read as any text (Tokenizer); others would be looked for before everything else.
        and all(token.get("special") for token in description.get("added_tokens") or ())
        and all(part.get("type") == "Digits" for part in before)
        and last.get("type") == "ByteLevel"
        and bool(last.get("use_regex", True))
        and not last.get("add_prefix_space")
    )
