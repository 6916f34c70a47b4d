"""Sampling parameters of a request and their valid ranges. Independent of torch: the gateway uses them too."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from lakh.errors import ConfigError
from lakh.server.structured.constraint import OutputConstraint

__all__ = [
    "MAX_ALLOWED_IDS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_CHARS",
    "MAX_BIAS",
    "MAX_BIASED_IDS",
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_SEED",
    "MAX_STOPS",
    "MAX_STOP_IDS",
    "MAX_TEMPERATURE",
    "MIN_REPETITION_PENALTY",
    "NO_LIMIT",
    "SamplingParams",
]

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_IDS = 1024
MAX_BIAS = 100
MAX_BIASED_IDS = 4096
MAX_ALLOWED_IDS = 1 << 16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
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
    stop_token_ids: tuple[int, ...] = ()
    """The completion ends at the first of these ids, whose text it does not have."""
    include_stop_str_in_output: bool = False
    """The completion has the stop string, or the text of the stop id, that ended it."""
    ignore_eos: bool = False
    """The model's end-of-text tokens do not end the completion."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Ids, each with a number that is added to its logit; -100 excludes the id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these ids are sampled; None allows all."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated: the token that would complete one is excluded."""
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
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, f"{reprlib.repr(getattr(self, name))} is not true or false", "choose one")
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
            if not self.allowed_token_ids:
                raise ConfigError("allowed_token_ids", "is empty: it allows no token", "leave it out, or name ids")
        self._check_bias()
        self._check_bad_words()
        if self.structured_outputs is not None and self.min_tokens:
            found = f"cannot be combined with {self.structured_outputs.field}, which decides where a text ends"
            raise ConfigError("min_tokens", found, "remove one of them")
        if len(self.stop) > MAX_STOPS:
            raise ConfigError("stop", f"{len(self.stop)} strings are too many", f"give at most {MAX_STOPS}")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_IDS:
            raise ConfigError("logit_bias", f"has {len(self.logit_bias)} ids", f"give at most {MAX_BIASED_IDS}")
        _check_ids("logit_bias", tuple(number for number, _ in self.logit_bias), MAX_BIASED_IDS)
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, float, -MAX_BIAS, MAX_BIAS)

    def _check_bad_words(self) -> None:
        words, name = self.bad_words, "bad_words"
        if not isinstance(words, tuple) or not all(isinstance(word, str) and word.strip() for word in words):
            raise ConfigError(name, f"{reprlib.repr(words)} is not a list of words", 'give words such as "TODO"')
        if len(words) > MAX_BAD_WORDS:
            raise ConfigError(name, f"{len(words)} words are too many", f"give at most {MAX_BAD_WORDS}")
        longest = max(map(len, words), default=0)
        if longest > MAX_BAD_WORD_CHARS:
            raise ConfigError(name, f"a word has {longest} characters", f"give at most {MAX_BAD_WORD_CHARS}")

    @property
    def restricts_ids(self) -> bool:
        """Some ids are excluded, or preferred, whatever the model computes."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None

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


def _check_ids(name: str, ids: object, most: int) -> None:
    if not isinstance(ids, tuple) or not all(type(number) is int and number >= 0 for number in ids):
        raise ConfigError(name, f"{reprlib.repr(ids)} is not a list of token ids", "give whole numbers from 0")
    if len(ids) > most:
        raise ConfigError(name, f"{len(ids)} ids are too many", f"give at most {most}")
