"""Answers that are known already: the same question again, or the next characters of what was suggested.

In front of any backend. An answer is kept only where the question alone decides it: greedy or with a seed, one choice,
no log-probabilities, finished by itself. It is kept under a hash of tenant, salt, model, weights, and everything in
the request that may change the answer, up to the last line break before the cursor; the current line and the text stand
beside it:

    asked at        "    return le"     suggested "ft + right"
    asked again at  "    return le"     "ft + right", the same answer
    typed on to     "    return left +" " right", where the request says `reuse` (editors do, by `supersede`)

What follows a line break of a suggestion is kept under the place after it as well, for those who type past it. `reuse`
shortens an answer by what was typed, so it is never done unasked. Another tenant's question has another hash: it
neither reads these answers nor can tell by time that they are there. StepCosts one `get` of the store per request, and a
`put` for each line of an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints

from lakh.server.backend import Backend, MetricFamily, ModelCard, CompletionDelta, Usage
from lakh.server.request import CompletionRequest
from lakh.server.store import CacheStore

__all__ = ["CachedCompletion", "TextCache", "find_continuation", "cache_query_of", "remainders_of"]

TTL_S = 300.0
MAX_KNOWN = 8  # answers under one key: places in one line
MAX_BREAKS = 8  # of an answer, after which its rest is kept too
FORMAT = 2


@dataclass(frozen=True)
class CachedCompletion:
    """An answer, and the current line up to the cursor for which it was given."""

    line: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    is_rest: bool = False
    """Of an answer that was given before its line."""


_KINDS = get_type_hints(CachedCompletion)


@dataclass(frozen=True)
class CacheQuery:
    key: str
    line: str


class CompletionCache:
    def __init__(self, backend: Backend, store: CacheStore, ttl_s: float = TTL_S) -> None:
        self.backend, self.store = backend, store
        self._ttl_s = ttl_s
        self.num_asked = self.num_repeated = self.num_typed = 0

    @property
    def num_running(self) -> int:
        return self.backend.num_running

    @property
    def num_waiting(self) -> int:
        return self.backend.num_waiting

    def models(self) -> list[ModelCard]:
        return self.backend.models()

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        question = cache_query_of(request, self.models())
        known: list[CachedCompletion] = []
        if question is not None:
            self.num_asked += 1
            known = _read(await self.store.get(question.key))
            found = find_continuation(known, question.line, may_be_typed=request.reuse)
            if found is not None:
                text, answer = found
                is_typed = answer.is_rest or text != answer.text
                self.num_repeated += not is_typed
                self.num_typed += is_typed
                yield CompletionDelta(0, text, answer.finish_reason)
                yield Usage(answer.prompt_tokens, 0, answer.prompt_tokens)
                return
        texts: list[str] = []
        reason = None
        async with contextlib.aclosing(self.backend.complete(request)) as items:
            async for item in items:
                if isinstance(item, CompletionDelta):
                    texts.append(item.text)
                    reason = item.finish_reason or reason
                elif question is not None and reason in ("stop", "length"):
                    answer = CachedCompletion(question.line, "".join(texts), reason, item.prompt_tokens, item.completion_tokens)
                    self._keep(question, [answer, *[one for one in known if one.line != question.line]])
                    if request.reuse:
                        for typed, rest in remainders_of(answer):
                            self._keep(cache_query_of(_typed_on(request, typed), self.models()), [rest])
                yield item

    def _keep(self, question: CacheQuery | None, known: Sequence[CachedCompletion]) -> None:
        if question is not None:
            value = json.dumps([asdict(one) for one in known[:MAX_KNOWN]]).encode()
            self.store.put(question.key, value, self._ttl_s)

    def metric_families(self) -> list[MetricFamily]:
        return [
            *self.backend.metric_families(),
            MetricFamily("text_cache_queries_total", "counter", "Questions that may be known.", [("", self.num_asked)]),
            MetricFamily("text_cache_hits_total", "counter", "Questions asked before.", [("", self.num_repeated)]),
            MetricFamily("text_reuse_hits_total", "counter", "Suggestions typed into.", [("", self.num_typed)]),
        ]

    async def start(self) -> None:
        await self.backend.start()

    async def drain(self, deadline_s: float) -> None:
        await self.backend.drain(deadline_s)

    async def close(self) -> None:
        await self.backend.close()


def cache_query_of(request: CompletionRequest, models: Sequence[ModelCard]) -> CacheQuery | None:
    """What a request asks, as a key and the current line; None where its answer must not be kept."""
    sampling = request.sampling
    if request.num_choices != 1 or sampling.logprobs is not None or request.return_token_ids:
        return None
    if sampling.temperature > 0 and sampling.seed is None:
        return None
    weights = [card.weights for card in models if request.model in (None, card.id)]
    prompt = request.prompts[0]
    head, line = "", ""
    if isinstance(prompt, str):
        before, newline, line = prompt.rpartition("\n")
        head = before + newline
    asked: list[Any] = [
        FORMAT,
        [request.tenant, request.cache_salt, request.model, weights],
        [head, None if isinstance(prompt, str) else prompt, request.suffix, request.order if request.suffix else ""],
        [sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.stop],
        [request.stop_rule, request.heal],
    ]
    # JSON spells every list in one way only: two questions with one spelling are the same question.
    return CacheQuery(f"text:{hashlib.sha256(json.dumps(asked).encode()).hexdigest()}", line)


def remainders_of(answer: CachedCompletion) -> list[tuple[str, CachedCompletion]]:
    """For each line break of an answer: what was typed by then, and what is left of it."""
    lines = answer.text.splitlines(keepends=True)[:MAX_BREAKS]
    ends = [end for end in itertools.accumulate(map(len, lines)) if answer.text[end - 1] == "\n"]
    return [
        (answer.text[:end], replace(answer, line="", text=answer.text[end:], is_rest=True))
        for end in ends
        if end < len(answer.text)
    ]


def _typed_on(request: CompletionRequest, typed: str) -> CompletionRequest:
    prompt = request.prompts[0]
    return replace(request, prompts=(prompt + typed,)) if isinstance(prompt, str) else request


def find_continuation(known: Sequence[CachedCompletion], line: str, *, may_be_typed: bool) -> tuple[str, CachedCompletion] | None:
    """What is left of a known answer at this place in the line, and which answer it is."""
    for answer in known:
        if answer.line == line and (may_be_typed or not answer.is_rest):
            return answer.text, answer
    for answer in known if may_be_typed else ():
        typed = line[len(answer.line) :]
        if line.startswith(answer.line) and answer.text.startswith(typed) and len(typed) < len(answer.text):
            return answer.text[len(typed) :], answer
    return None


def _read(value: bytes | None) -> list[CachedCompletion]:
    """What a store gave back; anything that is not ours is nothing."""
    if value is None:
        return []
    try:
        known = [CachedCompletion(**one) for one in json.loads(value)]
    except (ValueError, TypeError, RecursionError):
        return []
    return [one for one in known if all(isinstance(getattr(one, name), kind) for name, kind in _KINDS.items())]
