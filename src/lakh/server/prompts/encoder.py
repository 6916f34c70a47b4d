"""Encodes prompts: a client's text or ids, truncated to the context; fill-in-the-middle prompts; token healing.

Text that will be cut to the context is cut to MAX_CHARS_PER_TOKEN characters per token first, so the cost of a prompt
is bounded by the context and not by what a client sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from lakh.errors import ConfigError, UserError
from lakh.server.prompts import fim
from lakh.server.prompts.incremental_tokenizer import DEFAULT_OPTIONS, EncodeOptions, IncrementalTokenizer
from lakh.server.prompts.token_healing import HealedPrompt, TokenHealer
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["MAX_CHARS_PER_TOKEN", "Prompt", "PromptEncoder"]

MAX_CHARS_PER_TOKEN = 8  # code has 3 to 4; text with more loses context that would have fit

Prompt = str | Sequence[int]
"""Text, or ids for what text cannot express: special tokens are never encoded from text (see `infill`)."""


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, spec: Model) -> None:
        self._tokenizer, self._spec = tokenizer, spec
        self._incremental = IncrementalTokenizer(tokenizer)

    def encode(
        self, prompt: Prompt, where: str = "prompt", *, options: EncodeOptions = DEFAULT_OPTIONS
    ) -> tuple[int, ...]:
        """All ids of a prompt. Raises a UserError for invalid text and for ids outside the vocabulary."""
        if not isinstance(prompt, str):
            if prompt and not 0 <= min(prompt) <= max(prompt) < self._spec.vocab:
                raise UserError(where, "has ids outside the vocabulary", f"use 0 to {self._spec.vocab - 1}")
            return tuple(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            found = f"has an unpaired surrogate at character {error.start}"
            raise UserError(where, found, "send whole Unicode characters") from None
        return tuple(self._incremental.encode(prompt, options))

    def min_tokens(self, prompt: Prompt) -> int:
        """A lower bound on the prompt's tokens, without tokenizing it: rejects prompts of megabytes early."""
        return self._incremental.min_tokens(prompt) if isinstance(prompt, str) else len(prompt)

    def truncate(self, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The end of a prompt that leaves room for max_tokens; an empty prompt becomes the end-of-text token."""
        return (ids or (self._tokenizer.eot,))[-self._max_prompt_tokens(max_tokens) :]

    def encode_end(
        self, text: str, max_tokens: int, *, options: EncodeOptions = DEFAULT_OPTIONS
    ) -> tuple[int, ...]:
        """The end of a text that leaves room for max_tokens; its start moves in steps, as in a middle's prefix."""
        room, step = self._max_prompt_tokens(max_tokens), fim.quantum(self._spec.context)
        ids = self.encode(self._end_of(text, room), options=options)
        return fim.cut_before(ids, room, step) or (self._tokenizer.eot,)

    def infill(
        self,
        prefix: str,
        suffix: str,
        max_tokens: int,
        order: fim.Order = "psm",
        *,
        options: EncodeOptions = DEFAULT_OPTIONS,
    ) -> tuple[int, ...]:
        """The fill-in-the-middle prompt for a prefix and a suffix, with room for max_tokens."""
        room = self._max_prompt_tokens(max_tokens)
        before = self.encode(self._end_of(prefix, room), options=options)
        after = self.encode(suffix[: room * MAX_CHARS_PER_TOKEN], "suffix", options=options)
        return fim.prompt(self._tokenizer, before, after, room, context=self._spec.context, order=order)

    def _end_of(self, text: str, room: int) -> str:
        """The end of a text that may fit into `room` tokens."""
        step = fim.quantum(self._spec.context) * MAX_CHARS_PER_TOKEN
        return fim.cut_before(text, room * MAX_CHARS_PER_TOKEN, step)

    def heal(self, ids: tuple[int, ...]) -> HealedPrompt:
        return self._healer.heal(ids)

    @cached_property
    def _healer(self) -> TokenHealer:  # decodes the whole vocabulary: made on first use
        return TokenHealer(self._tokenizer)

    def _max_prompt_tokens(self, max_tokens: int) -> int:
        context = self._spec.context
        if context < 2:
            raise ConfigError("model.context", f"{context} has no room for a prompt and a token", "train with more")
        return max(context - max_tokens, context // 2)
