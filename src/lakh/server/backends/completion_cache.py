"""A cache of completions in front of a backend: the same request again, or the rest of a suggestion being typed.

A completion is cached only if the request determines it: greedy or seeded, one choice, no log-probabilities or echo,
finished by itself. The key is a hash of tenant, salt, model, weights and everything in the request that can change the
completion, up to the last line break before the cursor; the current line and the text are in the value:

    requested at        "    return le"     suggested "ft + right"
    requested again at  "    return le"     "ft + right", the same completion
    typed on to         "    return left +" " right", if the request sets `reuse` (`supersede` implies it)

What follows a line break of a suggestion is also cached under the place after it, for users who type past it. `reuse`
shortens a completion by what was typed, so it is only used on request. Another tenant's request has another hash and
cannot detect these entries by timing. Costs one `get` of the store per request, and one `put` per line of a completion.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_type_hints

from lakh.server.backend import Backend, CompletionDelta, ModelCard, Usage
from lakh.server.metrics import MetricFamily, counter
from lakh.server.request import CompletionRequest
from lakh.server.store import CacheStore

__all__ = ["CacheQuery", "CachedCompletion", "CompletionCache", "cache_query_of", "find_continuation", "remainders_of"]

TTL_S = 300.0
MAX_PER_KEY = 8  # completions under one key: cursor positions in one line
MAX_BREAKS = 8  # line breaks of a completion after which its rest is cached too
FORMAT = 7
MAX_REQUEST_CHARS = 1 << 18  # a longer request is not hashed: no editor repeats it, and other requests would wait
MAX_TOKENS = 1 << 31  # a count above it is not one of ours


@dataclass(frozen=True)
class CachedCompletion:
    line: str
    """The current line up to the cursor of the request."""
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    stop_reason: str | int | None = None
    reasoning: str = ""
    """Before the whole text."""
    is_remainder: bool = False
    """The rest of a completion that was requested on an earlier line."""

    def tokens_of(self, text: str) -> int:
        """Tokens of this completion, or in proportion of a rest of it."""
        share = len(text) / len(self.text) if self.text else 1.0
        return math.ceil(share * self.completion_tokens)


_FIELD_TYPES = {
    name: get_args(kind) or (kind,) for name, kind in get_type_hints(CachedCompletion).items()
}  # of a union its members


@dataclass(frozen=True)
class CacheQuery:
    key: str
    line: str


class CompletionCache:
    def __init__(self, backend: Backend, store: CacheStore) -> None:
        self.backend, self.store = backend, store
        self.num_queries = self.num_repeated = self.num_typed = 0

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        models = self.backend.models()  # before: a text is cached for the weights that were asked
        query = cache_query_of(request, models)
        cached: list[CachedCompletion] = []
        if query is not None:
            self.num_queries += 1
            cached = _decode(await self.store.get(query.key))
            found = find_continuation(cached, query.line, allow_typed=_may_reuse(request))
            if found is not None:
                text, hit = found
                is_typed = hit.is_remainder or text != hit.text
                self.num_repeated += not is_typed
                self.num_typed += is_typed
                reasoning = "" if is_typed else hit.reasoning
                yield CompletionDelta(0, text, hit.finish_reason, stop_reason=hit.stop_reason, reasoning=reasoning)
                yield Usage(hit.prompt_tokens, hit.tokens_of(text), hit.prompt_tokens, is_cached=True)
                return
        texts: list[str] = []
        reasonings: list[str] = []
        reason, stop_reason = None, None
        async with contextlib.aclosing(self.backend.complete(request)) as items:
            async for item in items:
                if isinstance(item, CompletionDelta):
                    texts.append(item.text)
                    reasonings.append(item.reasoning)
                    reason, stop_reason = item.finish_reason or reason, item.stop_reason
                elif query is not None and reason in ("stop", "length") and _is_of(item, request, models):
                    new = CachedCompletion(
                        query.line,
                        "".join(texts),
                        reason,
                        item.prompt_tokens,
                        item.completion_tokens,
                        stop_reason,
                        "".join(reasonings),
                    )
                    self._put(query, [new, *[one for one in cached if one.line != query.line]])
                    if _may_reuse(request):
                        for typed, remainder in remainders_of(new):
                            self._put(cache_query_of(_typed_on(request, typed), models), [remainder])
                yield item

    def _put(self, query: CacheQuery | None, completions: Sequence[CachedCompletion]) -> None:
        if query is not None:
            value = json.dumps([asdict(one) for one in completions[:MAX_PER_KEY]]).encode()
            self.store.put(query.key, value, TTL_S)

    def metric_families(self) -> list[MetricFamily]:
        return [
            counter("text_cache_queries_total", "Requests that can be cached.", self.num_queries),
            counter("text_cache_hits_total", "Repeated requests.", self.num_repeated),
            counter("text_reuse_hits_total", "Suggestions that were typed into.", self.num_typed),
        ]


def _is_of(usage: Usage, request: CompletionRequest, models: Sequence[ModelCard]) -> bool:
    """Whether these models computed the whole completion, as far as is known: weights may have been swapped."""
    return usage.weights in (None, *(card.weights for card in models if request.model in (None, card.id)))


def _may_reuse(request: CompletionRequest) -> bool:
    """The rest of a completion of a given form does not have that form."""
    return request.reuse and request.sampling.structured_outputs is None


def cache_query_of(request: CompletionRequest, models: Sequence[ModelCard]) -> CacheQuery | None:
    """The cache key and the current line of a request; None if its completion must not be cached."""
    sampling = request.sampling
    if request.num_choices != 1 or sampling.logprobs is not None or request.return_token_ids:
        return None
    if request.tools is not None:
        return None
    if request.echo or sampling.prompt_logprobs is not None:
        return None
    if request.num_chars > MAX_REQUEST_CHARS:
        return None
    if sampling.temperature > 0 and sampling.seed is None:
        return None
    weights = [card.weights for card in models if request.model in (None, card.id)]
    prompt = request.prompts[0]
    head, line = "", ""
    if isinstance(prompt, str):
        before, newline, line = prompt.rpartition("\n")
        head = before + newline
    identity: list[Any] = [
        FORMAT,
        [request.tenant, request.cache_salt, request.model, weights],
        [head, None if isinstance(prompt, str) else prompt, request.suffix, request.order if request.suffix else ""],
        asdict(sampling),
        [request.stop_rule, request.heal, request.extra, request.parse_special, request.messages],
        [request.as_message, request.system, request.context_ids],
        [request.add_generation_prompt, request.continue_final_message, request.template_variables],
    ]
    # JSON encodes each list in one way only, so equal encodings mean equal requests.
    return CacheQuery(f"text:{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}", line)


def remainders_of(completion: CachedCompletion) -> list[tuple[str, CachedCompletion]]:
    """For each line break of a completion: the text up to it, and the rest after it."""
    text = completion.text
    lines = text.splitlines(keepends=True)[:MAX_BREAKS]
    ends = [end for end in itertools.accumulate(map(len, lines)) if text[end - 1] == "\n"]
    return [
        (
            text[:end],
            replace(
                completion,
                line="",
                text=text[end:],
                completion_tokens=completion.tokens_of(text[end:]),
                reasoning="",
                is_remainder=True,
            ),
        )
        for end in ends
        if end < len(text)
    ]


def _typed_on(request: CompletionRequest, typed: str) -> CompletionRequest:
    prompt = request.prompts[0]
    return replace(request, prompts=(prompt + typed,)) if isinstance(prompt, str) else request


def find_continuation(
    cached: Sequence[CachedCompletion], line: str, *, allow_typed: bool
) -> tuple[str, CachedCompletion] | None:
    """What remains of a cached completion at this point of the line, and the completion."""
    for one in cached:
        if one.line == line and (allow_typed or not one.is_remainder):
            return one.text, one
    for one in cached if allow_typed else ():
        typed = line[len(one.line) :]
        if line.startswith(one.line) and one.text.startswith(typed) and len(typed) < len(one.text):
            return one.text[len(typed) :], one
    return None


def _decode(value: bytes | None) -> list[CachedCompletion]:
    """A value of the store; foreign data decodes to nothing."""
    if value is None:
        return []
    try:
        cached = [CachedCompletion(**one) for one in json.loads(value)]
    except (ValueError, TypeError, RecursionError):
        return []
    return [one for one in cached if _is_valid(one)]


def _is_valid(one: CachedCompletion) -> bool:
    has_types = all(type(getattr(one, name)) in kinds for name, kinds in _FIELD_TYPES.items())
    if not has_types or one.finish_reason not in ("stop", "length"):
        return False
    return all(0 <= count <= MAX_TOKENS for count in (one.prompt_tokens, one.completion_tokens))
