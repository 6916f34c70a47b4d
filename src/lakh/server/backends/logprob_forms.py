"""Log-probabilities in the forms of OpenAI's completions and of vLLM's `prompt_logprobs`.

A token that holds a part of a character has U+FFFD in its text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakh.server.detokenizer import REPLACEMENT
from lakh.server.sampling.tokens import Logprobs

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["EchoedPrompt", "TokenTexts", "openai_logprobs", "vllm_prompt_logprobs"]

MAX_PARTS = 8  # tokens of one character at most; more are no text


class TokenTexts:
    """The texts of tokens, for one request: a table that lasts longer would tell one tenant's tokens to another by its
    response times."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.begin_ids = tokenizer, tokenizer.begin_ids
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """Where other text comes before."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.of([token])
        return text

    def of(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode_continuation(tokens, show_special=True)

    def of_first(self, tokens: Sequence[int]) -> str:
        """Of tokens that begin a text."""
        return self._tokenizer.decode(tokens, show_special=True)


class EchoedPrompt:
    """A prompt as it is repeated before its completion: text as it was sent, ids with their special tokens."""

    def __init__(
        self, texts: TokenTexts, prompt: str | tuple[int, ...], ids: Sequence[int], *, parse_special: bool = False
    ) -> None:
        """`ids`: what the model computed, which may begin with tokens that the text does not have."""
        self._texts, self._ids = texts, ids
        self.text = prompt if isinstance(prompt, str) else texts.of_first(prompt)
        begin = texts.begin_ids
        is_hidden = isinstance(prompt, str) and tuple(ids[: len(begin)]) == begin
        if is_hidden and parse_special and begin and self.text.startswith(texts.of_first(begin)):
            is_hidden = False
        self._num_begin = len(begin) if is_hidden else 0

    def logprobs(self, items: Sequence[Logprobs | None]) -> dict[str, Any]:
        """OpenAI's form; the first token has none."""
        found = openai_logprobs(self._texts, items, 0)
        first = self._num_begin
        found["tokens"] = [self._texts[token] for token in self._ids]
        if first < len(self._ids):
            found["tokens"][first] = self._texts.of_first([self._ids[first]])
        found["text_offset"] = self._offsets(found["tokens"])
        return found

    def _offsets(self, tokens: Sequence[str]) -> list[int]:
        """Where each token begins in the text; the parts of a character begin where it does."""
        offsets = [0] * self._num_begin
        at, parts = 0, list[int]()
        for token, text in itertools.islice(zip(self._ids, tokens, strict=True), self._num_begin, None):
            offsets.append(min(at, len(self.text)))
            if parts or REPLACEMENT in text:
                parts.append(token)
                text = self._texts.of(parts)
                if text.endswith(REPLACEMENT) and len(parts) < MAX_PARTS:
                    continue
                parts = []
            at += len(text)
        return offsets


def openai_logprobs(texts: TokenTexts, items: Sequence[Logprobs | None], offset: int) -> dict[str, Any]:
    """Parallel lists. The token itself is among the top ones; of several with the same text the most likely one."""
    tokens = ["" if item is None else texts[item.token] for item in items]
    return {
        "tokens": tokens,
        "token_logprobs": [None if item is None else item.logprob for item in items],
        "top_logprobs": [None if item is None else _top(texts, item) for item in items],
        "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
    }


def _top(texts: TokenTexts, item: Logprobs) -> dict[str, float]:
    found = {texts[item.token]: item.logprob}
    for token, logprob in item.top:
        text = texts[token]
        if logprob > found.get(text, -float("inf")):
            found[text] = logprob
    return found


def vllm_prompt_logprobs(
    texts: TokenTexts, items: Sequence[Logprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """For each token but the first: its own id and the most likely ones, with logprob, rank and text."""
    return [None if item is None else _ranked(texts, item, num_top) for item in items]


def _ranked(texts: TokenTexts, item: Logprobs, num_top: int) -> dict[str, Any]:
    top = {token: (logprob, rank) for rank, (token, logprob) in enumerate(item.top[:num_top], 1)}
    found = {item.token: (item.logprob, item.rank), **top}
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": texts[token]}
        for token, (logprob, rank) in found.items()
    }
