"""Token healing: a prompt that ends inside a word is continued as the word would have been written.

`re` at the end of a prompt is a token of its own, and a model that has only seen `return` as one token finds what comes
after `re` unlikely. Healing takes the prompt's last token away, lets the first drawn token be any that begins with the
same text (the token itself among them, so there is always one), and leaves that text out of the answer.

Knows a tokenizer; knows nothing of models. Prompts that end with a special token, or inside a character, stay as they
are.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from lakh.server.spelling import UNFINISHED

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Healed", "Healer"]


class Healed(NamedTuple):
    ids: tuple[int, ...]
    first_ids: tuple[int, ...] | None
    """The first token is one of these; None: any."""
    skip: str
    """The answer repeats this first."""


class Healer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = ((tokenizer.decode([token]), token) for token in range(tokenizer.vocab_size))
        # Special tokens have no text; half characters cannot be compared.
        by_text = sorted((text, token) for text, token in texts if text and UNFINISHED not in text)
        self._texts, self._tokens = [text for text, _ in by_text], tuple(token for _, token in by_text)

    def heal(self, ids: tuple[int, ...]) -> Healed:
        """At least one token stays, for the model to read."""
        text = self._tokenizer.decode(ids[-1:]) if ids else ""
        if len(ids) < 2 or not text or UNFINISHED in text:
            return Healed(ids, None, "")
        # Looked for anew each time: what is remembered of one tenant's prompts would make another's faster.
        low, high = bisect_left(self._texts, text), bisect_left(self._texts, text + "\U0010ffff")
        longer = self._tokens[low:high]
        if len(longer) == 1:  # nothing else could have been meant
            return Healed(ids, None, "")
        return Healed(ids[:-1], longer, text)
