"""Incremental detokenization: token ids to text, without ever emitting half a character.

A byte-level decoder concatenates the tokens' bytes and decodes UTF-8. A token whose bytes are whole characters then
always adds the same text, so `Detokenizer.token_text` is a table lookup instead of microseconds of decoding per token.
For other decoders (some drop a leading space) and for tokens that hold parts of characters it returns None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["REPLACEMENT", "Detokenizer", "DetokenizerStream", "decodes_bytewise"]

REPLACEMENT = "\ufffd"  # decoders emit it for bytes that are not (yet) a character


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode
        # The whole vocabulary at once (0.2 s for 50,000): a lazy table would leak one tenant's tokens through timing.
        ids = range(tokenizer.vocab_size if decodes_bytewise(json.loads(tokenizer.raw)) else 0)
        texts = ((token, self.decode([token])) for token in ids)
        self._texts = {token: text for token, text in texts if REPLACEMENT not in text}

    def token_text(self, token: int) -> str | None:
        """What the token adds to text that ends with a whole character; None if that depends on its context."""
        return self._texts.get(token)


def decodes_bytewise(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json decodes by concatenating the bytes of its tokens."""
    decoder = description.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


class DetokenizerStream:
    """Decodes the tokens of one completion as they arrive."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        skip: str = "",
        context: Sequence[int] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """Drops `skip` from the start of the text, if the text starts with it (token healing repeats it). `context`:
        Tokenizer.continuation_context if other text comes before. `shown`: special tokens with the text that they add.
        """
        self._shown = shown or {}
        self._decode, self._token_text = detokenizer.decode, detokenizer.token_text
        self._skip, self._before = skip, tuple(context)
        # Some decoders treat the first token specially (a leading space), so the last decoded tokens stay as context.
        self._context: list[int] = list(context)
        self._context_text = self._decode(self._context) if context else ""
        self._pending: list[int] = []

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of these first tokens of the completion."""
        return self._decode([*self._before, *tokens])[len(self._decode(self._before)) if self._before else 0 :]

    def append(self, token: int) -> str:
        """The text that is now complete."""
        if token in self._shown:
            return self.finish() + self._without_skip(self._shown[token])
        if not self._pending:
            text = self._token_text(token)
            if text is not None:
                self._context, self._context_text = [], ""
                return self._without_skip(text)
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])
        return "" if text.endswith(REPLACEMENT) else self._flush(text)

    def finish(self) -> str:
        """The rest, including incomplete characters."""
        return self._flush(self._decode([*self._context, *self._pending])) if self._pending else ""

    def _flush(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return self._without_skip(new)

    def _without_skip(self, text: str) -> str:
        if self._skip:
            size = min(len(self._skip), len(text))
            is_repeated, self._skip = self._skip[:size] == text[:size], self._skip[size:]
            text = text[size:] if is_repeated else text
        return text
