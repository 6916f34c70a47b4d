"""Encodes prompts: a client's text or ids, truncated to the context; fill-in-the-middle prompts; token healing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from lakh.errors import ConfigError, UserError
from lakh.server.prompts import fim
from lakh.server.prompts.incremental_tokenizer import DEFAULT_OPTIONS, EncodeOptions, IncrementalTokenizer
from lakh.server.prompts.token_healing import HealedPrompt, TokenHealer
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Prompt", "PromptEncoder"]

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

    def encode_prompt(self, prompt: Prompt, *, options: EncodeOptions = DEFAULT_OPTIONS) -> tuple[int, ...]:
        """`encode`, with the tokens before a text that the model expects. Ids stay as they are."""
        ids = self.encode(prompt, options=options)
        return (*self._tokenizer.begin_ids, *ids) if isinstance(prompt, str) else ids

    def min_tokens(self, prompt: Prompt) -> int:
        """A lower bound on the prompt's tokens, without tokenizing it: rejects prompts of megabytes early."""
        return self._incremental.min_tokens(prompt) if isinstance(prompt, str) else len(prompt)

    def truncate(self, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The end of a prompt that leaves room for max_tokens, after the tokens that begin every text. An empty prompt
        becomes the end-of-text token."""
        room, begin = self._max_prompt_tokens(max_tokens), self._tokenizer.begin_ids
        if len(ids) <= room:
            return ids or (self._tokenizer.eot,)
        if not begin or ids[: len(begin)] != begin or len(begin) >= room:
            return ids[-room:]
        return (*begin, *ids[len(begin) - room :])

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
        before, after = self.encode(prefix, options=options), self.encode(suffix, "suffix", options=options)
        room = self._max_prompt_tokens(max_tokens)
        return fim.prompt(self._tokenizer, before, after, room, context=self._spec.context, order=order)

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
