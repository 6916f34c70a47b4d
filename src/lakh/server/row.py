"""One request on its way: its tokens so far, its text so far, and why it ended.

`push` takes a token that was drawn, `finish` ends the row; both say nothing once it has ended. `take_text` hands out
the text that has become certain since the last call. Knows sampling and text; knows nothing of models, blocks'
contents or clocks (its deadline is a number that the engine compares).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from lakh.server.model.block_pool import Lease
from lakh.server.sampling import Draws, Logprobs, Sampling
from lakh.server.text import StopRule, StopText, TextStream

__all__ = ["Chunk", "Completion", "FinishReason", "Row"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Completion:
    text: str
    """Without the stop text, special tokens, and what followed them."""
    tokens: tuple[int, ...]
    """Every token that was drawn, a closing end-of-text included."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Tokens that the model saw: fewer than the prompt had where its beginning was cut off."""
    logprobs: tuple[Logprobs, ...] | None = None
    """One for each token, where they were asked for."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion: the texts of all chunks are its text, their tokens its tokens."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    """On the last chunk only."""
    logprobs: tuple[Logprobs, ...] | None = None


@dataclass(eq=False)
class Row:
    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    """At most so many new tokens."""
    draws: Draws
    eot: int
    text: TextStream
    space: Hashable = ""
    """Whose cache this row may read and write: the tenant."""
    deadline_s: float | None = None
    """On the engine's clock; past it the row ends with "abort"."""
    rule: StopRule | None = None
    first_ids: tuple[int, ...] | None = None
    """The first token is one of these (token healing)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    lease: Lease | None = None
    num_computed: int = 0
    """Tokens (prompt, then drawn ones) whose keys and values lie in the lease's blocks."""
    num_cached: int = 0
    """Prompt tokens that were found in the cache and not computed."""
    arrived_s: float = 0.0
    """These three on the engine's clock: submitted, let in for the first time, and its first token drawn."""
    began_s: float | None = None
    first_s: float | None = None

    def __post_init__(self) -> None:
        self._stop = StopText(self.sampling.stop)
        self._shown: list[str] = []
        self._sent = 0
        self._ids = list(self.prompt)

    @property
    def ids(self) -> list[int]:
        """Prompt and drawn tokens."""
        return self._ids

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self._ids) - self.num_computed

    @property
    def is_free(self) -> bool:
        """Samples without a seed: any draw from the right probabilities will do. With a seed the draws are given."""
        return self.sampling.temperature > 0 and self.sampling.seed is None

    @property
    def is_plainly_greedy(self) -> bool:
        """Its next token is that of the largest score, and nothing else is asked of the scores."""
        is_bound = self.first_ids is not None and not self.tokens
        return self.sampling.temperature == 0 and self.sampling.logprobs is None and not is_bound

    def push(self, token: int) -> None:
        if self.finish_reason is not None:
            return
        self.tokens.append(token)
        self._ids.append(token)
        if token == self.eot:
            self.finish("stop")
            return
        self._show(self.text.push(token))
        if self._stop.found or (self.rule is not None and self.rule.found):
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self._show(self.text.finish())
            if not self._stop.found:
                self._shown.append(self._through_rule(self._stop.finish()))
            stopped = self._stop.found or (self.rule is not None and self.rule.found)
            self.finish_reason = "stop" if stopped else reason

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def take_chunk(self) -> Chunk | None:
        """What came since the last call; None where nothing is certain yet."""
        text = self.take_text()
        if not text and self.finish_reason is None:
            return None
        chunk = Chunk(
            text,
            tuple(self.tokens[self._sent :]),
            self.finish_reason,
            None if self.sampling.logprobs is None else tuple(self.logprobs[self._sent :]),
        )
        self._sent = len(self.tokens)
        return chunk

    def completion(self) -> Completion:
        assert self.finish_reason is not None  # asked for only at the end
        logprobs = None if self.sampling.logprobs is None else tuple(self.logprobs)
        return Completion(self.take_text(), tuple(self.tokens), self.finish_reason, len(self.prompt), logprobs)

    def _show(self, text: str) -> None:
        self._shown.append(self._through_rule(self._stop.push(text)))

    def _through_rule(self, text: str) -> str:
        return text if self.rule is None else self.rule.push(text)
