"""Special tokens in a prompt's text, for clients that write fill-in-the-middle prompts themselves (`parse_special`).

By default text is never read as a special token, because code may contain `<|fim_suffix|>` as text. A client that sends
`<|fim_prefix|>...` as the prompt says so with the request.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["SpecialTokens"]


class SpecialTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        added = json.loads(tokenizer.raw).get("added_tokens") or ()
        self._ids = {token["content"]: int(token["id"]) for token in added if token.get("special")}
        for text, number in list(self._ids.items()):  # <fim_prefix> and <|fim_prefix|> are two spellings of one token
            other = f"<{text[2:-2]}>" if text.startswith("<|") and text.endswith("|>") else f"<|{text[1:-1]}|>"
            if text.startswith("<") and text.endswith(">"):
                self._ids.setdefault(other, number)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def split(self, text: str) -> list[str | int]:
        """The text in pieces: ids of special tokens, and the text between them."""
        if self._pattern is None:
            return [text] if text else []
        return [self._ids.get(piece, piece) for piece in self._pattern.split(text) if piece]
