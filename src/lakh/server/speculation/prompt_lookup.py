"""Prompt lookup: draft tokens copied from the last place where the end of the text occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["PromptLookup"]

WIDTH = array("i").itemsize
SIZES = (4, 3, 2)


class PromptLookup:
    """Proposes what followed the last occurrence of the last 4, 3 or 2 tokens.

    Keeps tokens as bytes, so a search is one memory search: microseconds for thousands of tokens, and no index to build
    when a prompt arrives.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def propose(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens. `ids` only grows between calls."""
        end = len(ids)
        self._bytes += array("i", ids[len(self._bytes) // WIDTH :]).tobytes()
        for size in SIZES:
            if end > size:
                index = self._find(self._bytes[(end - size) * WIDTH :], (end - 1) * WIDTH)
                if index is not None:
                    return _continuation(ids, index + size, max_tokens)
        return []

    def _find(self, wanted: bytes | bytearray, before: int) -> int | None:
        """The index of the last token at which these bytes start and end before `before`."""
        at = self._bytes.rfind(wanted, 0, before)
        while at >= 0 and at % WIDTH:  # a match inside a token
            at = self._bytes.rfind(wanted, 0, at + len(wanted) - 1)
        return at // WIDTH if at >= 0 else None


def _continuation(ids: Sequence[int], start: int, max_tokens: int) -> list[int]:
    """ids[start:], continued with its own tokens past the end: a loop is continued as a loop."""
    tokens: list[int] = []
    for at in range(start, start + max_tokens):
        tokens.append(ids[at] if at < len(ids) else tokens[at - len(ids)])
    return tokens
