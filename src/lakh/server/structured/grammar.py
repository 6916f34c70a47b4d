"""Compiles constraints with llguidance and computes, before every token, which tokens may follow.

A compiled grammar is cached per cache space, so one tenant's schemas never speed up another's requests. Compiling
releases the interpreter; llguidance bounds the work of compiling and of each token, and a grammar beyond these bounds
is an error of its request. These bounds allow an ambiguous grammar a quarter of a second of every step, so the time of
its tokens is bounded too: for all texts of a form, by MAX_EXCESS_S of what each takes beyond EASY_S, unless that is
rare.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from lakh.errors import ConfigError, MissingExtra
from lakh.server.structured.constraint import OutputConstraint
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "TokenMatcher"]

MAX_CACHED = 64  # compiled grammars
MAX_ERROR_CHARS = 160
EASY_S = 0.01  # of a processor; a mask for a JSON schema takes 0.1 to 2 ms with 150,000 ids
MAX_EXCESS_S = 0.25
RARE_EXCESS_S = 0.001  # on average: single slow tokens never add up to a refusal
TOO_SLOW = "takes too long for each token: it is ambiguous or too large"
# Both common styles of JSON, on one line or indented, and no endless white space.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t]?|\n[ ]{0,24}"}


class _CompiledForm:
    """A grammar, and the time that the tokens of all its texts took."""

    def __init__(self, matcher: Any, clock: Callable[[], float]) -> None:
        self.matcher, self._clock = matcher, clock
        self._excess_s, self._num_calls = 0.0, 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = self._clock()
        yield
        self._num_calls += 1
        self._excess_s += max(self._clock() - began_s - EASY_S, 0.0)

    @property
    def is_too_slow(self) -> bool:
        return self._excess_s > max(MAX_EXCESS_S, RARE_EXCESS_S * self._num_calls)


class TokenMatcher:
    """The position of one sequence in its grammar."""

    def __init__(self, form: _CompiledForm, num_ids: int, end_ids: Sequence[int]) -> None:
        self._form, self._matcher = form, form.matcher.deep_copy()
        self._num_ids, self._end_ids = num_ids, frozenset(end_ids)

    def allowed(self, drafted: Sequence[int] = ()) -> np.ndarray | None:
        """Whether each id may follow the tokens so far and these drafted ones. None if the drafted ones are not allowed
        themselves: the first of them will be rejected.
        """
        if not self._end_ids.isdisjoint(drafted):
            return None
        with self._form.timed():
            return self._allowed(drafted)

    def _allowed(self, drafted: Sequence[int]) -> np.ndarray | None:
        num_taken = self._matcher.try_consume_tokens(list(drafted)) if drafted else 0
        try:
            if num_taken < len(drafted):
                return None
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            return np.unpackbits(bits, count=self._num_ids, bitorder="little").view(np.bool_)
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)

    def append(self, token: int) -> None:
        """Advance by a token that is allowed and does not end the text."""
        with self._form.timed():
            self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """The text matches, and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why no token can be computed; None if nothing is wrong."""
        if self._form.is_too_slow:
            return TOO_SLOW
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` counts the time of this thread on a processor: how busy the machine is decides nothing."""
        self._tokenizer, self._clock = tokenizer, clock
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[Hashable, OutputConstraint], _CompiledForm] = OrderedDict()

    def matcher(self, constraint: OutputConstraint, cache_space: Hashable = "") -> TokenMatcher:
        """A matcher at the beginning of a text. Raises a ConfigError for an invalid constraint."""
        key = cache_space, constraint
        with self._lock:
            compiled = self._cached.get(key)
            if compiled is not None:
                self._cached.move_to_end(key)
            vocabulary = self._vocabulary
        if compiled is None:
            compiled = _CompiledForm(_compile(vocabulary, constraint), self._clock)
        if compiled.is_too_slow:
            raise _invalid(constraint, TOO_SLOW)
        with self._lock:
            self._cached[key] = compiled
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            return TokenMatcher(compiled, self._tokenizer.vocab_size, self._tokenizer.end_ids)

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's view of the vocabulary: about a second for 50,000 tokens, so made on first use."""
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise MissingExtra("structured output", "llguidance", "structured") from None
        end_ids = [self._tokenizer.eot, *self._tokenizer.end_ids[1:]]
        raw = self._tokenizer.raw.decode()
        return LLTokenizer(raw, n_vocab=self._tokenizer.vocab_size, eos_token=end_ids)


def _compile(vocabulary: Any, constraint: OutputConstraint) -> Any:
    import llguidance

    try:
        if constraint.kind == "json":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(constraint.text, overrides=JSON_OPTIONS)
        else:
            grammar = llguidance.grammar_from(constraint.kind, constraint.text)
    except (ValueError, RecursionError) as error:
        raise _invalid(constraint, str(error)) from None
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    # The first token builds most of the lexer, and shows most limits: here and not in the engine's step.
    if not matcher.is_error():
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        first = [int(token) for token in allowed if token not in vocabulary.eos_tokens][:1]
        if first and matcher.consume_token(first[0]):
            matcher.rollback(1)
    if matcher.is_error():
        raise _invalid(constraint, matcher.get_error())
    return matcher


def _invalid(constraint: OutputConstraint, error: str) -> ConfigError:
    what = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}
    found = f"is not a usable {what[constraint.kind]} ({_first_line(error)})"
    return ConfigError(constraint.field, found, "correct it, or see the limits in docs/how-to/serving.md")


def _first_line(error: str) -> str:
    """Without the places that llguidance adds to its messages."""
    return error.partition("\n<")[0].strip().replace("\n", " ")[:MAX_ERROR_CHARS]
