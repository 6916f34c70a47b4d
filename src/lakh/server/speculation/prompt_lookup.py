"""Prompt lookup: draft tokens copied from the last place where the end of the text occurred before."""

from __future__ import annotations

import codecs
import sys
from array import array
from collections.abc import Sequence

__all__ = ["PromptLookup"]

DECODE = codecs.utf_32_le_decode if sys.byteorder == "little" else codecs.utf_32_be_decode
LONG, SHORT = (4, 3), 2


class PromptLookup:
    """Proposes what followed the last occurrence of the last 4, 3 or 2 tokens.

    Keeps each token as one character of a string, so a search is one string search: a microsecond for thousands of
    tokens, and no index to build when a prompt arrives.
    """

    def __init__(self) -> None:
        self._text = ""

    def propose(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens. `ids` only grows between calls."""
        self._text += DECODE(array("I", ids[len(self._text) :]), "surrogatepass", True)[0]
        end = self._end_of_last_occurrence()
        return [] if end is None else _continuation(ids, end, max_tokens)

    def _end_of_last_occurrence(self) -> int | None:
        text = self._text
        before = len(text) - 1
        if before < SHORT:
            return None
        at = text.rfind(text[-SHORT:], 0, before)
        if at < 0:
            return None
        end = at + SHORT
        for size in LONG:  # ends with the short one, so it does not end later
            if before >= size:
                at = text.rfind(text[-size:], 0, end)
                if at >= 0:
                    return at + size
        return end


def _continuation(ids: Sequence[int], start: int, max_tokens: int) -> list[int]:
    """ids[start:], continued with its own tokens past the end: a loop is continued as a loop."""
    tokens = list(ids[start : start + max_tokens])
    for at in range(start + len(tokens), start + max_tokens):
        tokens.append(tokens[at - len(ids)])
    return tokens
