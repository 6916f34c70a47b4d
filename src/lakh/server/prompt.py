"""Prompts as ids: text or ids of a client, cut to the room that a context leaves; holes (fim.py); half words (heal.py).

Lines of text are remembered by space, a tenant's (lines.py). Knows a tokenizer and a model's context and vocabulary;
knows nothing of rows. What is no text is a UserError.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakh.errors import ConfigError, UserError
from lakh.server import fim
from lakh.server.heal import Healed, Healer
from lakh.server.lines import ANY, Lines, Reading
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Prompt", "Prompts"]

Prompt = str | Sequence[int]
"""Text, or ids for what text cannot say: special tokens stand in no text (see `Prompts.infill`)."""


class Prompts:
    def __init__(self, tokenizer: Tokenizer, spec: Model) -> None:
        self._tokenizer, self._spec = tokenizer, spec
        self._lines = Lines(tokenizer)
        self._healer: Healer | None = None  # made when first asked for: it spells the whole vocabulary

    def encode(self, prompt: Prompt, where: str = "prompt", reading: Reading = ANY) -> tuple[int, ...]:
        """The ids of a prompt, all of them; a UserError where it is no text or has ids that do not exist."""
        if not isinstance(prompt, str):
            if prompt and not 0 <= min(prompt) <= max(prompt) < self._spec.vocab:
                raise UserError(where, "has ids outside the vocabulary", f"use 0 to {self._spec.vocab - 1}")
            return tuple(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(where, f"has half a character at {error.start}", "send whole Unicode characters") from None
        return tuple(self._lines.encode(prompt, reading))

    def least_tokens(self, prompt: Prompt) -> int:
        """So many it has for sure: enough to refuse a prompt of megabytes unread."""
        return self._lines.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)

    def cut(self, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The end of a prompt that leaves room for max_tokens; an empty prompt begins a document."""
        return (ids or (self._tokenizer.eot,))[-_room(self._spec.context, max_tokens) :]

    def infill(
        self, prefix: str, suffix: str, max_tokens: int, order: fim.Order, reading: Reading = ANY
    ) -> tuple[int, ...]:
        """The prompt that asks for what stands between prefix and suffix, with room for max_tokens."""
        before, after = self.encode(prefix, reading=reading), self.encode(suffix, "suffix", reading)
        room = _room(self._spec.context, max_tokens)
        return fim.prompt(self._tokenizer, before, after, room, context=self._spec.context, order=order)

    def heal(self, ids: tuple[int, ...]) -> Healed:
        """A prompt whose last token the first drawn one may complete."""
        if self._healer is None:
            self._healer = Healer(self._tokenizer)
        return self._healer.heal(ids)


def _room(context: int, max_tokens: int) -> int:
    """Tokens of a prompt that are kept."""
    if context < 2:
        raise ConfigError("model.context", f"{context} has no room for a prompt and a token", "train with more")
    return max(context - max_tokens, context // 2)
