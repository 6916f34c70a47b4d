"""Token healing: continue a prompt that ends inside a word as if the word had been tokenized whole.

`retu` at the end of a prompt is two tokens, and a model that has only seen `return` as one token finds any continuation
of them unlikely. Healing removes the tokens of the word at the end of the prompt (or the last token, if no word is
there), makes the completion repeat the removed text first, in whatever tokens the model prefers, and drops that text
from the completion. Prompts that end with a special token or inside a character stay unchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lakh.server.detokenizer import REPLACEMENT

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["HealedPrompt", "RepeatedText", "TokenHealer"]

MAX_REMOVED_TOKENS = 8


class HealedPrompt(NamedTuple):
    ids: tuple[int, ...]
    repeated: RepeatedText | None = None
    """What the completion has to repeat first; None if nothing was removed."""


class RepeatedText(NamedTuple):
    """The text that a completion starts with."""

    text: str
    healer: TokenHealer

    def allowed_after(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The ids that may follow these tokens of the completion; None once the text has been repeated."""
        left = self.text
        for token in tokens:
            if not left:
                return None
            left = left[len(self.healer.text_of(token)) :]
        return self.healer.ids_towards(left) if left else None


class TokenHealer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = ((tokenizer.decode_continuation([token]), token) for token in range(tokenizer.vocab_size))
        # Special tokens have no text; partial characters cannot be compared.
        by_text = sorted((text, token) for text, token in texts if text and REPLACEMENT not in text)
        self._texts, self._tokens = [text for text, _ in by_text], tuple(token for _, token in by_text)

    def text_of(self, token: int) -> str:
        return self._tokenizer.decode_continuation([token])

    def heal(self, ids: tuple[int, ...]) -> HealedPrompt:
        """At least one token stays in the prompt."""
        num_removed = self._num_removed(ids)
        kept, text = ids[: len(ids) - num_removed], self._tokenizer.decode_continuation(ids[len(ids) - num_removed :])
        # The removed tokens themselves are always allowed; with no other choice nothing would change.
        if not num_removed or (num_removed == 1 and len(self.ids_towards(text)) == 1):
            return HealedPrompt(ids)
        return HealedPrompt(kept, RepeatedText(text, self))

    def _num_removed(self, ids: tuple[int, ...]) -> int:
        """The last tokens back to the one in which the word at the end begins; 0 if the prompt cannot be healed."""
        is_inside_word = True
        count = 0
        while is_inside_word and count < min(MAX_REMOVED_TOKENS, len(ids) - 1):
            text = self.text_of(ids[-count - 1])
            if not text or REPLACEMENT in text:  # a special token, or a part of a character
                break
            if count and not _is_word(text[-1]):  # the word begins with the token after this one
                break
            count += 1
            is_inside_word = all(map(_is_word, text))
        return count

    def ids_towards(self, text: str) -> tuple[int, ...]:
        """The ids of tokens that start with `text`, or that `text` starts with.

        Searched each time: a cache of one tenant's prompts would show in another's timing.
        """
        low, high = bisect_left(self._texts, text), bisect_left(self._texts, text + "\U0010ffff")
        found = list(self._tokens[low:high])
        for size in range(1, len(text)):
            at = bisect_left(self._texts, text[:size])
            while at < len(self._texts) and self._texts[at] == text[:size]:
                found.append(self._tokens[at])
                at += 1
        return tuple(found)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
