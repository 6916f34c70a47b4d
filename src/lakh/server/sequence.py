"""A sequence: one completion in progress, with its tokens, its text so far and its finish reason.

Independent of the model: the scheduler owns a sequence's place in the queues and its KV-cache blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Literal

from lakh.errors import UserError
from lakh.server.detokenizer import DetokenizerStream
from lakh.server.fairness import Share
from lakh.server.model.adapters import ServedAdapter
from lakh.server.model.block_pool import Lease
from lakh.server.prompts.token_healing import RepeatedText
from lakh.server.sampling.logits_processor import LogitsProcessor
from lakh.server.sampling.prompt_logprobs import PromptLogprobs
from lakh.server.sampling.tokens import Logprobs, NoiseKeys, SamplingParams
from lakh.server.stopping import StopStrings, TextEnd
from lakh.server.structured.grammar import TokenMatcher

__all__ = ["Chunk", "Completion", "FinishReason", "Sequence"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Completion:
    text: str
    """Ends before the stop string or special token that finished it."""
    tokens: tuple[int, ...]
    """All sampled tokens, including a final end-of-text token."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Prompt tokens after truncation to the context."""
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """One for each token of the prompt, None for the first; None if they were not requested or it was aborted."""
    stop_reason: str | int | None = None
    """The stop string, or the id of the request's `stop_token_ids`, that ended it."""


@dataclass(frozen=True)
class Chunk:
    """Part of a completion: the chunks' texts and tokens concatenate to the completion's."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    """Set on the last chunk only."""
    logprobs: tuple[Logprobs, ...] | None = None
    num_accepted: int = 0
    """Draft tokens among `tokens`."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """Those of the completion, on its first chunk only."""
    stop_reason: str | int | None = None
    """That of the completion, on its last chunk."""


@dataclass(eq=False)
class Sequence:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    noise_keys: NoiseKeys
    end_ids: tuple[int, ...]
    detokenizer: DetokenizerStream
    cache_space: Hashable = ""
    """Sequences share cached prefixes only within one space (a tenant)."""
    deadline_s: float | None = None
    """On the engine's clock; the scheduler aborts the sequence after it."""
    generation_s: float | None = None
    """The same, this long after its first token, once it has a line break."""
    stop_rules: tuple[TextEnd, ...] = ()
    """Each gets the text that the one before it emits."""
    repeated: RepeatedText | None = None
    """Restricts the first sampled tokens to those of a text (token healing)."""
    tenant: str = ""
    matcher: TokenMatcher | None = None
    """Restricts every token to what the form of the completion allows (structured output)."""
    adapter: ServedAdapter | None = None
    prompt_logprobs: PromptLogprobs | None = None
    processor: LogitsProcessor | None = None
    """Changes the logits of every token as the request says."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop id that finished it; None if the model or something else did."""
    failure: UserError | None = None
    """Why the completion cannot go on; it has then finished with "abort"."""
    lease: Lease | None = None
    num_computed: int = 0
    """Tokens (prompt, then sampled ones) whose keys and values are in the lease's blocks."""
    weights_version: int = -1
    """Of the engine, when it started or went on after a preemption; -1 before."""
    has_mixed_weights: bool = False
    """Weights were swapped between two of its tokens."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache."""
    num_drafted: int = 0
    """Draft tokens that were verified for it, and those of them that were accepted."""
    num_accepted: int = 0
    arrived_s: float = 0.0
    """Submitted, first scheduled and first token sampled, on the engine's clock."""
    started_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self._stop_strings = StopStrings(self.sampling.stop, is_included=self.sampling.include_stop_str_in_output)
        self._finishing_ids = {*(() if self.sampling.ignore_eos else self.end_ids), *self.sampling.stop_token_ids}
        self._text: list[str] = []
        self._num_sent = 0
        self._num_accepted_sent = 0
        self._is_prompt_sent = False
        self._has_line_break = False
        self.is_taken = False
        """The last chunk was taken."""
        self.ids = list(self.prompt)
        """Prompt and sampled tokens."""
        self.share = Share(self.tenant, self.cache_space)

    @property
    def prefix_space(self) -> Hashable:
        """Where its cached prefixes are found: keys and values differ between adapters."""
        return self.cache_space if self.adapter is None else (self.cache_space, self.adapter.digest)

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of its prompt are still to be computed; it has no tokens then."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def prefill_key(self) -> Hashable:
        """Equal for sequences of which one computes the prompt for the others."""
        return self.prefix_space, self.prompt, self.prompt_logprobs if self.scores_prompt else None

    @property
    def reusable_ids(self) -> ListOf[int]:
        """The tokens whose keys and values it may find in the cache, and the one after them. The logits of a cached
        token are not kept, so a prompt with log-probabilities reuses those that gave its own already.
        """
        if self.prompt_logprobs is not None and self.scores_prompt:
            return self.prompt[: len(self.prompt_logprobs) + 1]
        return self.ids if self.tokens else self.prompt  # equal without tokens; slicing the tuple is faster

    def is_late(self, now_s: float) -> bool:
        if self.deadline_s is not None and self.deadline_s < now_s:
            return True
        if self.generation_s is None or self.first_token_s is None:
            return False
        return self._has_line_break and self.first_token_s + self.generation_s < now_s

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.ids) - self.num_computed

    @property
    def is_unseeded(self) -> bool:
        """Samples without a seed: any sample from the right distribution is a valid answer."""
        return self.sampling.temperature > 0 and self.sampling.seed is None

    @property
    def is_plain_greedy(self) -> bool:
        """The next token is the argmax, and nothing else is needed from the logits."""
        sampling = self.sampling
        is_greedy = sampling.temperature == 0 and sampling.logprobs is None
        return is_greedy and self.adapter is None and not self.is_constrained

    @property
    def is_constrained(self) -> bool:
        """The logits of the next token are changed before it is sampled. Once False, it stays so."""
        is_restricted = (self.matcher or self.processor) is not None or self.allowed_ids() is not None
        return is_restricted or len(self.tokens) < self.sampling.min_tokens or self.sampling.has_penalties

    def allowed_ids(self, drafted: ListOf[int] = ()) -> tuple[int, ...] | None:
        """The ids that may follow the sampled tokens and these drafted ones; None allows any."""
        if self.repeated is None:
            return None
        return self.repeated.allowed_after([*self.tokens, *drafted])

    def append(self, token: int) -> None:
        """Add a sampled token. No-op after the sequence has finished."""
        if self.finish_reason is not None:
            return
        self.tokens.append(token)
        self.ids.append(token)
        if token in self._finishing_ids or (self.matcher is not None and token in self.end_ids):
            if self.sampling.include_stop_str_in_output and token in self.sampling.stop_token_ids:
                self._emit(self.detokenizer.append(token))
            self.stop_reason = None if self._ends_text(token) else token
            self.finish("stop")
            return
        self._emit(self.detokenizer.append(token))
        is_complete = False
        if self.matcher is not None:
            self.matcher.append(token)
            is_complete = self.matcher.is_complete
            if self.matcher.error is not None:
                self.fail(self.matcher.error)
        if is_complete or self._stop_strings.found or self._is_ruled:
            self.finish("stop")
        elif len(self.tokens) >= self.max_new_tokens:
            self.finish("length")

    def fail(self, reason: str) -> None:
        """Finish because what the request demands of its tokens cannot be followed any further."""
        if self.finish_reason is None:
            found = f"cannot be followed any further ({reason})"
            self.failure = UserError(self._demanding_field, found, "give a simpler one")
            self.finish("abort")

    @property
    def _demanding_field(self) -> str:
        sampling = self.sampling
        if sampling.structured_outputs is not None:
            return sampling.structured_outputs.field
        found = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_words}
        return next((name for name, value in found.items() if value), "logit_bias")

    def finish(self, reason: FinishReason) -> None:
        """No-op after the sequence has finished."""
        if self.finish_reason is None:
            self._emit(self.detokenizer.finish())
            if not self._stop_strings.found:
                self._text.append(self._apply_stop_rules(self._stop_strings.finish()))
            if self._is_ruled or self._stop_strings.found:  # before a stop id, and a rule before a stop string
                self.stop_reason = None if self._is_ruled else self._stop_strings.stop
                reason = "stop"
            self.finish_reason = reason

    @property
    def _is_ruled(self) -> bool:
        return any(rule.found for rule in self.stop_rules)

    def _ends_text(self, token: int) -> bool:
        """The model itself ends the text, whatever the request stops at."""
        return token in self.end_ids and (self.matcher is not None or not self.sampling.ignore_eos)

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def take_chunk(self) -> Chunk | None:
        """What is new since the last call; None if no text is final yet, and after the last chunk."""
        if self.is_taken:
            return None
        text = self.take_text()
        if not text and self.finish_reason is None:
            return None
        self.is_taken = self.finish_reason is not None
        logprobs = None if self.sampling.logprobs is None else tuple(self.logprobs[self._num_sent :])
        num_accepted = self.num_accepted - self._num_accepted_sent
        prompt = None if self._is_prompt_sent else self._prompt_items()
        self._is_prompt_sent = True
        tokens = tuple(self.tokens[self._num_sent :])
        stop_reason = self.stop_reason if self.is_taken else None
        chunk = Chunk(text, tokens, self.finish_reason, logprobs, num_accepted, prompt, stop_reason)
        self._num_sent, self._num_accepted_sent = len(self.tokens), self.num_accepted
        return chunk

    def _prompt_items(self) -> tuple[Logprobs | None, ...] | None:
        if self.prompt_logprobs is None or not self.prompt_logprobs.is_complete:
            return None
        return self.prompt_logprobs.items()

    def completion(self) -> Completion:
        """The whole completion; call it once, after the sequence has finished. Raises its failure, if it has one."""
        if self.failure is not None:
            raise self.failure
        assert self.finish_reason is not None
        logprobs = None if self.sampling.logprobs is None else tuple(self.logprobs)
        text, tokens, prompt = self.take_text(), tuple(self.tokens), self._prompt_items()
        return Completion(
            text, tokens, self.finish_reason, len(self.prompt), logprobs, prompt, stop_reason=self.stop_reason
        )

    def _emit(self, text: str) -> None:
        if text:
            self._has_line_break |= "\n" in text
            self._text.append(self._apply_stop_rules(self._stop_strings.push(text)))

    def _apply_stop_rules(self, text: str) -> str:
        for rule in self.stop_rules:
            text = rule.push(text)
        return text
