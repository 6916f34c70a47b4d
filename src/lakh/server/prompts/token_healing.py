"""Token healing: continue a prompt that ends inside a word as if the word had been tokenized whole.

`re` at the end of a prompt is one token, and a model that has only seen `return` as one token finds any continuation of
`re` unlikely. Healing removes the prompt's last token, restricts the first sampled token to those that start with the
same text (which include the token itself), and drops that text from the completion. Prompts that end with a special
token or inside a character stay unchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from lakh.server.detokenizer import REPLACEMENT

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["HealedPrompt", "TokenHealer"]


class HealedPrompt(NamedTuple):
    ids: tuple[int, ...]
    first_token_ids: tuple[int, ...] | None = None
    """Allowed first tokens; None allows any."""
    skip: str = ""
    """Text that the completion repeats first."""


class TokenHealer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = ((tokenizer.decode([token]), token) for token in range(tokenizer.vocab_size))
        # Special tokens have no text; partial characters cannot be compared.
        by_text = sorted((text, token) for text, token in texts if text and REPLACEMENT not in text)
        self._texts, self._tokens = [text for text, _ in by_text], tuple(token for _, token in by_text)

    def heal(self, ids: tuple[int, ...]) -> HealedPrompt:
        """At least one token stays in the prompt."""
        text = self._tokenizer.decode(ids[-1:]) if ids else ""
        if len(ids) < 2 or not text or REPLACEMENT in text:
            return HealedPrompt(ids)
        # Searched each time: a cache of one tenant's prompts would show in another's timing.
        low, high = bisect_left(self._texts, text), bisect_left(self._texts, text + "\U0010ffff")
        candidates = self._tokens[low:high]
        if len(candidates) == 1:
            return HealedPrompt(ids)
        return HealedPrompt(ids[:-1], candidates, text)
