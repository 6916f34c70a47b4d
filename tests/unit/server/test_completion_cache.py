"""The completion cache: repeated requests, typed suggestions, isolation of tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.server import engine as engines
from lakh.server.backend import CompletionDelta, Usage
from lakh.server.backends.completion_cache import CachedCompletion, CompletionCache, cache_query_of, find_continuation
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.request import CompletionRequest, parse
from lakh.server.store import MemoryCacheStore, RedisCacheStore

ASK = {"prompt": "def add(left, right):\n    ret", "max_tokens": 12, "temperature": 0}


async def ask(cache: CompletionCache, tenant: str = "", **fields: Any) -> tuple[str, Usage]:
    items = [item async for item in cache.complete(parse({**ASK, **fields}, tenant))]
    usage = items.pop()
    assert isinstance(usage, Usage)
    return "".join(item.text for item in items if isinstance(item, CompletionDelta)), usage


@pytest.fixture
def cache_of(make_engine: Callable[..., Engine]) -> Callable[..., CompletionCache]:
    def make(store: Any = None) -> CompletionCache:
        return CompletionCache(InProcessBackend(make_engine()), MemoryCacheStore() if store is None else store)

    return make


def generated(cache: CompletionCache) -> int:
    assert isinstance(cache.backend, InProcessBackend)
    return cache.backend.engine.counters.generated_tokens


def test_a_repeated_request_generates_nothing(cache_of: Callable[..., CompletionCache]) -> None:
    async def main() -> None:
        cache = cache_of()
        first, usage = await ask(cache)
        assert usage.completion_tokens > 0
        before = generated(cache)
        assert (await ask(cache))[0] == first
        assert generated(cache) == before
        assert (cache.num_queries, cache.num_repeated) == (2, 1)
        await cache.backend.close()

    asyncio.run(main())


def test_typed_suggestions_are_reused_only_on_request(cache_of: Callable[..., CompletionCache]) -> None:
    async def main() -> None:
        cache = cache_of()
        text, _ = await ask(cache)
        assert "\n" not in text[:3]
        assert len(text) > 3
        before = generated(cache)
        typed = ASK["prompt"] + text[:3]
        again, _ = await ask(cache, prompt=typed, supersede="file.py")
        assert again == text[3:]
        assert generated(cache) == before
        _, usage = await ask(cache, prompt=typed)  # without reuse the model completes it
        assert not usage.is_cached
        assert generated(cache) > before
        _, usage = await ask(cache, prompt=ASK["prompt"] + "~", supersede="file.py")
        assert not usage.is_cached
        await cache.backend.close()

    asyncio.run(main())


def test_a_suggestion_is_reused_past_its_line_breaks(cache_of: Callable[..., CompletionCache]) -> None:
    text = "urn left + right\n\n\ndef sub(left"

    async def complete(request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        yield CompletionDelta(0, text, "length")
        yield Usage(9, 12)

    async def main() -> None:
        cache = cache_of()
        backend = cache.backend
        cache.backend = SimpleNamespace(models=backend.models, complete=complete)  # type: ignore[assignment]
        assert (await ask(cache, supersede="f"))[0] == text
        for typed in range(1, len(text)):
            prompt = ASK["prompt"] + text[:typed]
            assert (await ask(cache, prompt=prompt, supersede="f"))[0] == text[typed:]
        assert cache.num_typed == len(text) - 1
        for prompt in (ASK["prompt"] + "urn left + right\n", ASK["prompt"] + "urn left - right\n"):
            _, usage = await ask(cache, prompt=prompt)  # without reuse, or with other text typed
            assert not usage.is_cached
        await backend.close()

    asyncio.run(main())


CHAT = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "x"}}
CHANGES: list[dict[str, Any]] = [
    {"max_tokens": 11},
    {"stop": ["x"]},
    {"suffix": "\n"},
    {"stop_rule": "line"},
    {"prompt": "def add(left, right) :\n    ret"},
    {"cache_salt": "s"},
    {"heal": True},
    {"temperature": 0.5, "seed": 1},
    {"top_k": 3, "temperature": 0.5, "seed": 1},
    {"min_p": 0.1, "temperature": 0.5, "seed": 1},
    {"min_tokens": 3},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 1},
    {"frequency_penalty": 1},
    {"ignore_eos": True},
    {"stop_token_ids": [20]},
    {"logit_bias": {"20": 1}},
    {"logit_bias": {"20": 2}},
    {"allowed_token_ids": [20]},
    {"bad_words": ["x"]},
    {"include_stop_str_in_output": True},
    {"prompt": None, "messages": CHAT},
    {"prompt": None, "messages": CHAT, "add_generation_prompt": False},
    {"prompt": None, "messages": CHAT, "add_generation_prompt": False, "continue_final_message": True},
    {"prompt": None, "messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
    {"prompt": None, "messages": CHAT, "chat_template_kwargs": {"enable_thinking": True}},
    {"prompt": None, "messages": [*CHAT, {"role": "tool", "content": "x"}]},
    {"prompt": None, "messages": [*CHAT, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
]


def test_everything_that_may_change_a_completion_is_part_of_the_key(cache_of: Callable[..., CompletionCache]) -> None:
    models = cache_of().backend.models()
    keys = [cache_query_of(parse({**ASK, **change}), models) for change in ({}, *CHANGES)]
    assert len({query.key for query in keys if query}) == len(keys)
    other = [type(models[0])(models[0].id, models[0].context, "other weights")]
    assert cache_query_of(parse(ASK), other) != cache_query_of(parse(ASK), models)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1},
        {"n": 2},
        {"logprobs": 1},
        {"prompt": ["a", "b"]},
        {"suffix": "x" * 300_000},
        {"prompt": None, "messages": CHAT, "tools": [TOOL]},
    ],
)
def test_completions_not_determined_by_their_request_and_huge_ones_are_not_cached(change: dict[str, Any]) -> None:
    assert cache_query_of(parse({**ASK, **change}), []) is None


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_a_tenant_cannot_read_or_detect_completions_of_another(
    cache_of: Callable[..., CompletionCache], kind: str, request: pytest.FixtureRequest
) -> None:
    async def main() -> None:
        store = (
            RedisCacheStore(request.getfixturevalue("redis_server").url, limit_s=10.0)
            if kind == "redis"
            else MemoryCacheStore()
        )
        cache = cache_of(store)
        assert isinstance(cache.backend, InProcessBackend)
        counts = cache.backend.engine.counters
        fields = {"prompt": "the secret of tenant a is 42\n" * 2, "supersede": "f"}
        _, first = await ask(cache, "a", **fields)
        for tenant, salt in (("b", ""), ("", ""), ("b", "a"), ("", "a"), ("a", "b")):
            steps, cached = counts.steps, counts.cached_tokens
            _, usage = await ask(cache, tenant, **fields, cache_salt=salt)
            # All of the work is done again, so timing reveals nothing.
            assert (usage.completion_tokens, usage.cached_tokens) == (first.completion_tokens, 0)
            assert counts.cached_tokens == cached
            assert counts.steps > steps
        while getattr(store, "_writes", ()):
            await asyncio.sleep(0.001)
        _, own = await ask(cache, "a", **fields)
        assert own.is_cached  # for this tenant
        assert own.completion_tokens == first.completion_tokens  # what the client reads
        await cache.backend.close()
        await store.close()

    asyncio.run(main())


def test_foreign_data_in_the_store_is_a_miss(cache_of: Callable[..., CompletionCache]) -> None:
    async def main() -> None:
        cache = cache_of()
        query = cache_query_of(parse(ASK), cache.backend.models())
        assert query is not None
        other = CachedCompletion(query.line, 5, None, "1", 1)  # type: ignore[arg-type]
        invented = [{"finish_reason": 'x"} 1\nlakh:evil 1'}, {"completion_tokens": -1}, {"prompt_tokens": 10**30}]
        shaped = [asdict(CachedCompletion(query.line, "evil()", "stop", 1, 1)) | change for change in invented]
        junk_values = [b"", b"\xff", b"5", b"[5]", b'[{"line": "x"}]', b"{}"]
        for junk in (*junk_values, *(json.dumps([one]).encode() for one in (asdict(other), *shaped))):
            cache.store.put(query.key, junk, 60)
            text, usage = await ask(cache)
            assert text
            assert not usage.is_cached
        await cache.backend.close()

    asyncio.run(main())


@given(line=st.text("ab", max_size=4), text=st.text("ab", max_size=6), typed=st.text("ab", max_size=6))
def test_typed_text_and_remainder_concatenate_to_the_completion(line: str, text: str, typed: str) -> None:
    known = [CachedCompletion(line, text, "stop", 1, 1)]
    found = find_continuation(known, line + typed, allow_typed=True)
    if found is not None:
        assert typed + found[0] == text
        assert found[0] or not typed
    else:
        assert not text.startswith(typed) or typed == text
    strict = find_continuation(known, line + typed, allow_typed=False)
    assert (strict is not None) == (typed == "")


def test_a_text_is_cached_for_the_weights_that_computed_all_of_it(make_engine: Callable[..., Engine]) -> None:
    """A swap in the middle, found by the model's card or not yet (it arrives late from the engine's process)."""

    async def main() -> None:
        engine, store = make_engine(), MemoryCacheStore()
        backend = InProcessBackend(engine)
        new = make_engine(seed=2).network
        cards = backend.models()  # of before
        for models in (backend.models, lambda: cards):
            lagging = SimpleNamespace(models=models, complete=backend.complete)
            cache = CompletionCache(lagging, store)  # type: ignore[arg-type]
            request = parse({**ASK, "supersede": "f", "max_tokens": 60})
            async for item in cache.complete(request):
                if isinstance(item, CompletionDelta) and engine.weights_version == 0:
                    engine.swap(new)  # FINISH_S is 0: the text goes on with other weights
            assert isinstance(item, Usage)
            assert item.weights in ("", backend.models()[0].weights)
            assert item.weights != cards[0].weights
            assert not store._entries
        cache = CompletionCache(backend, store)
        _, usage = await ask(cache)
        assert usage.weights == backend.models()[0].weights
        assert store._entries
        await backend.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "FINISH_S", 0.0)
        asyncio.run(main())
