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
        self._texts = sorted(self._ids, key=len, reverse=True)  # the longest first
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._texts)) + ")") if self._texts else None

    def mask(self, text: str, form: str) -> str:
        """The text with `form` of a number in place of each special token: `split` does not find it."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: form.format(self._texts.index(found[0])), text)

    def unmask(self, text: str, form: str) -> str:
        for number, original in enumerate(self._texts):
            text = text.replace(form.format(number), original)
        return text

    def split(self, text: str) -> list[str | int]:
        """The text in pieces: ids of special tokens, and the text between them."""
        if self._pattern is None:
            return [text] if text else []
        return [self._ids.get(piece, piece) for piece in self._pattern.split(text) if piece]
