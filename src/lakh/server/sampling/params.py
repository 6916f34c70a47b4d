"""Sampling parameters of a request and their valid ranges. Independent of torch: the gateway uses them too."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from lakh.errors import ConfigError
from lakh.server.structured.constraint import OutputConstraint

__all__ = [
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_SEED",
    "MAX_STOPS",
    "MAX_TEMPERATURE",
    "MIN_REPETITION_PENALTY",
    "NO_LIMIT",
    "SamplingParams",
]

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 100
MAX_PENALTY = 2
NO_LIMIT = 2**31  # as max_tokens: what the prompt leaves of the context
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a completion. An invalid value raises a ConfigError that names the field."""

    max_tokens: int = 64
    """Maximum number of new tokens; NO_LIMIT is what the prompt leaves of the context."""
    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0 means all."""
    min_p: float = 0.0
    """Sample from the tokens with at least this share of the most likely token's probability."""
    min_tokens: int = 0
    """The end-of-text token is excluded before this many tokens; stop strings still end a completion."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and the completion, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the completion."""
    frequency_penalty: float = 0.0
    """The same, times how often the token occurs there."""
    seed: int | None = None
    """The same seed, prompt and weights give the same completion; None picks a random seed."""
    stop: tuple[str, ...] = ()
    """The completion ends before the first occurrence of any of these strings."""
    logprobs: int | None = None
    """Report the log-probability of each sampled token and of this many top alternatives."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt; with max_tokens 0 nothing is generated."""
    structured_outputs: OutputConstraint | None = None
    """The form that the completion must have."""

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, int, 1 if self.prompt_logprobs is None else 0, NO_LIMIT)
        _check("temperature", self.temperature, float, 0, MAX_TEMPERATURE)
        _check("top_p", self.top_p, float, 0, 1)
        if self.top_p == 0:
            raise ConfigError("top_p", "0 excludes every token", "choose a value above 0, up to 1")
        _check("top_k", self.top_k, int, 0, 2**31)
        _check("min_p", self.min_p, float, 0, 1)
        _check("min_tokens", self.min_tokens, int, 0, self.max_tokens)
        _check("repetition_penalty", self.repetition_penalty, float, MIN_REPETITION_PENALTY, MAX_PENALTY)
        _check("presence_penalty", self.presence_penalty, float, -MAX_PENALTY, MAX_PENALTY)
        _check("frequency_penalty", self.frequency_penalty, float, -MAX_PENALTY, MAX_PENALTY)
        if self.seed is not None:
            _check("seed", self.seed, int, 0, MAX_SEED)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, int, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, int, 0, MAX_LOGPROBS)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            found = f"{reprlib.repr(self.stop)} is not a list of non-empty strings"
            raise ConfigError("stop", found, "give strings such as '\\n\\n'")
        if self.structured_outputs is not None and self.min_tokens:
            found = f"cannot be combined with {self.structured_outputs.field}, which decides where a text ends"
            raise ConfigError("min_tokens", found, "remove one of them")
        if len(self.stop) > MAX_STOPS:
            raise ConfigError("stop", f"{len(self.stop)} strings are too many", f"give at most {MAX_STOPS}")

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the context that the prompt must leave."""
        return 1 if self.max_tokens == NO_LIMIT else self.max_tokens

    @property
    def has_penalties(self) -> bool:
        """The logits of a token depend on earlier tokens in more ways than the model's."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check(name: str, value: object, kind: type, low: float, high: float) -> None:
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]  # NaN compares false and is refused too
        what = "whole number" if kind is int else "number"
        raise ConfigError(name, f"{reprlib.repr(value)} is not a {what} from {low} to {high}", "choose one")
