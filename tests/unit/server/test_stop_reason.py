"""vLLM's `stop_reason`: the stop string or the stop id that ended a completion, and null where neither did."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api.dialects.openai import OPENAI
from lakh.server.api.dialects.openai_chat import OPENAI_CHAT
from lakh.server.backend import CompletionDelta
from lakh.server.backends.completion_cache import CompletionCache
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.gateway.replica import _delta
from lakh.server.prompts.chat_template import ChatTemplate
from lakh.server.request import parse
from lakh.server.store import MemoryCacheStore

from .test_dialects import Post, run
from .test_gateway import Fleet
from .test_gateway import run as run_gateway

PROMPT, EOT = "def add(", 0
ASK = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cases(engine: Engine) -> list[tuple[dict[str, Any], str, str | int | None]]:
    """Fields of a request, and the reasons why its completion ends."""
    (plain,) = engine.generate([PROMPT], SamplingParams(max_tokens=12))
    stop, token = plain.text[4:6], plain.tokens[4]
    end = {"logit_bias": {str(EOT): 100}}
    return [
        ({}, "length", None),
        ({"stop": stop}, "stop", stop),
        ({"stop": ["never", stop, stop + "and more"]}, "stop", stop),
        ({"stop": stop, "include_stop_str_in_output": True}, "stop", stop),
        ({"stop_token_ids": [token]}, "stop", token),
        ({"stop_token_ids": [token, 299], "include_stop_str_in_output": True}, "stop", token),
        ({"stop": plain.text[:1], "stop_token_ids": [token]}, "stop", plain.text[:1]),
        (end, "stop", None),
        ({**end, "stop_token_ids": [EOT]}, "stop", None),
        ({**end, "stop_token_ids": [EOT], "ignore_eos": True}, "stop", EOT),
        ({"guided_regex": "ab", "stop_token_ids": [299]}, "stop", None),
    ]


def streamed(text: str) -> list[Any]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


def test_completions_and_chats_have_it_whole_and_streamed(engine: Engine, cases: list[Any]) -> None:
    async def scenario(send: Post) -> None:
        for fields, finish, stop in cases:
            for path, prompt in (("/v1/completions", {"prompt": PROMPT}), (CHAT, {"messages": [chat]})):
                body = {**prompt, "max_tokens": 12, "temperature": 0, **fields}
                status, _, text = await send(path, body)
                assert status == 200, text
                (choice,) = json.loads(text)["choices"]
                assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop), fields
                _, _, text = await send(path, {**body, "stream": True})
                *others, last = streamed(text)
                assert (last["finish_reason"], last["stop_reason"]) == (finish, stop), fields
                assert all(one.get("stop_reason") is None for one in others)
        _, _, text = await send("/v1/completions", {**ASK, "n": 2, "seed": 1, "temperature": 1, "stop_rule": "line"})
        assert [choice["stop_reason"] for choice in json.loads(text)["choices"]] == [None, None]

    chat = {"role": "user", "content": PROMPT}
    template = engine.prompts.chat_template
    engine.prompts.chat_template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    try:
        run(engine, scenario)
    finally:
        engine.prompts.chat_template = template


def test_the_engine_s_completions_chunks_and_grpc_have_it(engine: Engine, cases: list[Any]) -> None:
    for fields, finish, stop in cases:
        sampling = parse({**ASK, **fields}).sampling
        (done,) = engine.generate([PROMPT], sampling)
        assert (done.finish_reason, done.stop_reason) == (finish, stop)
        *others, last = engine.stream(PROMPT, sampling)
        assert last.stop_reason == stop
        assert all(chunk.stop_reason is None for chunk in others)
    for stop in ("x", 0, 5):
        chunk = proto.CompleteChunk(**grpc_api._stop_reason(stop))
        assert chunk.WhichOneof("stop_reason") == ("stop_string" if stop == "x" else "stop_token_id")
        assert getattr(chunk, chunk.WhichOneof("stop_reason")) == stop
    assert proto.CompleteChunk(**grpc_api._stop_reason(None)).WhichOneof("stop_reason") is None


def test_a_gateway_gives_the_engine_s(engine: Engine, cases: list[Any]) -> None:
    async def scenario(fleet: Fleet) -> None:
        for fields, finish, stop in cases:
            _, answer = await fleet.post({**ASK, **fields})
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
            _, events = await fleet.stream({**ASK, **fields})
            assert [choice["stop_reason"] for event in events for choice in event["choices"]][-1] == stop
        async with (
            grpc_api.running(fleet.server.handler, "127.0.0.1", 0) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            complete = channel.unary_stream(
                f"/{proto.SERVICE}/Complete",
                request_serializer=proto.CompleteRequest.SerializeToString,
                response_deserializer=proto.CompleteChunk.FromString,
            )
            stop = cases[1][2]
            request = proto.CompleteRequest(prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
            *_, last, usage = [chunk async for chunk in complete(request, timeout=60)]
            assert (last.stop_string, usage.usage.prompt_tokens > 0) == (stop, True)

    run_gateway([engine], scenario)


def test_a_cached_completion_and_the_rest_of_one_keep_it(engine: Engine, cases: list[Any]) -> None:
    async def main() -> None:
        cache = CompletionCache(InProcessBackend(engine), MemoryCacheStore())

        async def last(**fields: Any) -> tuple[str, CompletionDelta]:
            deltas = [item async for item in cache.complete(parse({**ASK, **fields})) if hasattr(item, "text")]
            return "".join(delta.text for delta in deltas), deltas[-1]

        for number, (fields, finish, stop) in enumerate(cases):
            for num_hits in (0, 1):
                before = cache.num_repeated
                text, found = await last(**fields, reuse=True, cache_salt=str(number))
                assert (found.finish_reason, found.stop_reason) == (finish, stop)
                assert cache.num_repeated == before + num_hits
            if len(text) > 1 and "\n" not in text[:1] and "guided_regex" not in fields:
                typed, found = await last(**fields, reuse=True, cache_salt=str(number), prompt=PROMPT + text[0])
                assert (typed, found.stop_reason) == (text[1:], stop)
        assert cache.num_typed > 3
        await cache.backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("found", [True, 3.5, ["x"], {}])
def test_what_another_engine_reports_must_be_a_text_or_an_id(found: Any) -> None:
    choice = {"index": 0, "text": "x", "finish_reason": "stop"}
    assert _delta({**choice, "stop_reason": found}).stop_reason is None
    assert _delta({**choice, "stop_reason": 7}).stop_reason == 7
    assert _delta({**choice, "stop_reason": "\n"}).stop_reason == "\n"
    assert _delta(choice).stop_reason is None


def test_the_schemas_have_it() -> None:
    for dialect in (OPENAI, OPENAI_CHAT):
        assert "stop_reason" in dialect.response_schema["properties"]["choices"]["items"]["properties"]
