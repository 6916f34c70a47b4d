"""The gateway over real sockets, with lakh engines and with an engine that has OpenAI's form only."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.server import HttpServer, running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.gateway.fim_template import TEMPLATES, fim_prompt, fim_template_of
from lakh.server.gateway.gateway import Gateway
from lakh.server.gateway.replica import Replica
from lakh.server.gateway.replica_set import route_key
from lakh.server.gateway.routing import choose_replica
from lakh.server.request import parse
from lakh.server.store import MemoryCacheStore

TIMEOUT_S = 30.0
ASK = {"prompt": "def add(", "max_tokens": 40, "temperature": 0}
NAMES = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)


# --- routing ---


@given(names=NAMES, keys=st.lists(st.text(max_size=4), min_size=1, max_size=30))
def test_every_key_gets_a_replica_below_the_load_bound(names: list[str], keys: list[str]) -> None:
    loads = dict.fromkeys(names, 0)
    for number, key in enumerate(keys, 1):
        choice = choose_replica(key, loads)
        assert choice is not None
        loads[choice.name] += 1
        assert max(loads.values()) <= 1.25 * number / len(names) + 1
        assert choice.reason


@given(names=NAMES, key=st.text(max_size=5), data=st.data())
def test_a_replica_that_leaves_moves_only_its_own_keys(names: list[str], key: str, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    idle = dict.fromkeys(names, 0)
    before = choose_replica(key, idle)
    assert before is not None
    left = {name: 0 for name in names if name != gone}
    after = choose_replica(key, left)
    if before.name != gone:
        assert after is not None
        assert after.name == before.name
    if not left:
        assert after is None


def test_a_file_stays_on_its_replica_below_the_load_bound() -> None:
    first = choose_replica("file", {"a": 0, "b": 0})
    assert first is not None
    own = first.name
    other = {"a": "b", "b": "a"}[own]
    assert choose_replica("file", {own: 0, other: 0}, preferred=other) == (other, "it served this file before")
    full = choose_replica("file", {own: 0, other: 9}, preferred=other)
    assert full is not None
    assert full.name == own
    gone = choose_replica("file", {own: 5}, preferred=other)
    assert gone is not None
    assert gone.name == own


def test_one_file_of_one_user_has_one_key() -> None:
    def key(tenant: str = "", **fields: Any) -> str:
        return route_key(parse({**ASK, **fields}, tenant))

    file = {"user": "me", "supersede": "a.py"}
    assert key(**file) == key(**{**file, "prompt": "other text"})
    assert len({key(**file), key("t", **file), key(**{**file, "supersede": "b.py"}), key()}) == 4
    assert key(prompt="x" * 300) == key(prompt="x" * 300 + "typed on")


# --- infill templates ---


@given(before=st.text("ab<|fim_prefix>", max_size=3000), after=st.text("ab<|fim_middle>", max_size=3000))
def test_code_that_contains_a_special_token_cannot_break_the_prompt(before: str, after: str) -> None:
    template = TEMPLATES["lakh"]
    for order in ("psm", "spm"):
        prompt = fim_prompt(template, before, after + template.middle + "beyond", order=order, room_tokens=500)
        assert all(prompt.count(token) == 1 for token in template[:3])
        assert "beyond" not in prompt
        assert len(prompt) <= 500 * 2.5 + sum(len(token) for token in template[:3])


def test_a_prompt_is_cut_far_from_the_cursor_and_in_steps() -> None:
    template = fim_template_of("deepseek")
    assert template is not None
    before = "".join(f"{number:07}\n" for number in range(4000))
    prompts = [fim_prompt(template, before + "x" * n, "after", order="spm", room_tokens=2000) for n in range(40)]
    assert all(
        prompt.endswith(f"{template.suffix}after{template.middle}") for prompt in prompts
    )  # psm: the template has no spm
    assert len({prompt.removeprefix(template.prefix)[:7] for prompt in prompts}) <= 2
    for name in ("", "a,b", "gpt"):
        with pytest.raises(UserError):
            fim_template_of(name)
    assert fim_template_of("<P>,<S>,<M>") == ("<P>", "<S>", "<M>", True)


# --- with engines ---


class Fleet:
    """Engines on sockets, a gateway in front of them, and a client."""

    def __init__(
        self, engines: list[HttpServer], gateway: Gateway, server: HttpServer, session: aiohttp.ClientSession
    ) -> None:
        self.engines, self.gateway, self.server, self.session = engines, gateway, server, session

    async def post(self, body: Any, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.server.url}/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, body: Any) -> tuple[str, list[Any]]:
        async with self.session.post(f"{self.server.url}/v1/completions", json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = [line.strip() async for line in response.content if line.startswith(b"data: {")]
        events = [json.loads(line[6:]) for line in lines]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices")), events


@asynccontextmanager
async def gateway_of(engines: list[Engine], urls: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        options_of_server = {name: options.pop(name) for name in ("keys", "drain_s") if name in options}
        servers = [
            await stack.enter_async_context(running(InProcessBackend(engine), "127.0.0.1", 0, drain_s=0.1))
            for engine in engines
        ]
        gateway = Gateway([*[server.url for server in servers], *urls], store=MemoryCacheStore(), **options)
        server = await stack.enter_async_context(running(gateway, "127.0.0.1", 0, **options_of_server))
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Fleet(servers, gateway, server, session)


def run(engines: list[Engine], scenario: Callable[[Fleet], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), gateway_of(engines, **options) as fleet:
            await scenario(fleet)

    asyncio.run(main())


@pytest.fixture
def pair(make_engine: Callable[..., Engine]) -> list[Engine]:
    return [make_engine(), make_engine()]


def slow_down(engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    import time

    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(seconds) or step())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_gateway_gives_the_engines_completions_over_http_and_grpc(pair: list[Engine]) -> None:
    greedy = pair[0].generate(["def add("], SamplingParams(max_tokens=40))[0]
    infill = pair[0].generate([pair[0].prompts.infill("def add(", "\n", 8, "spm")], SamplingParams(max_tokens=8))[0]

    async def scenario(fleet: Fleet) -> None:
        status, whole = await fleet.post(ASK)
        assert (status, whole["choices"][0]["text"]) == (200, greedy.text)
        assert whole["usage"]["completion_tokens"] == len(greedy.tokens)
        assert (await fleet.stream(ASK))[0] == greedy.text
        _, filled = await fleet.post({**ASK, "suffix": "\n", "order": "spm", "max_tokens": 8})
        assert filled["choices"][0]["text"] == infill.text
        status, many = await fleet.post({**ASK, "prompt": ["def ", "class "], "n": 2, "temperature": 1, "logprobs": 2})
        assert status == 200
        assert [len(choice["logprobs"]["tokens"]) > 0 for choice in many["choices"]] == [True] * 4
        async with (
            grpc_api.running(fleet.server.handler, "127.0.0.1", 0) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            complete = channel.unary_stream(
                f"/{proto.SERVICE}/Complete",
                request_serializer=proto.CompleteRequest.SerializeToString,
                response_deserializer=proto.CompleteChunk.FromString,
            )
            request = proto.CompleteRequest(prompt="def add(", max_tokens=40, temperature=0)
            chunks = [chunk async for chunk in complete(request, timeout=TIMEOUT_S)]
            request.logprobs = 1
            scored = [chunk async for chunk in complete(request, timeout=TIMEOUT_S)]
        assert [item.token for chunk in scored for item in chunk.logprobs] == list(greedy.tokens)
        assert "".join(chunk.text for chunk in chunks) == greedy.text
        assert chunks[-1].usage.completion_tokens == len(greedy.tokens)

    run(pair, scenario)


def test_the_engines_error_messages_reach_the_client(pair: list[Engine]) -> None:
    async def scenario(fleet: Fleet) -> None:
        status, answer = await fleet.post({**ASK, "prompt": "x" * 2000})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert (await fleet.post({**ASK, "model": "gpt-9"}))[0] == 404
        assert (await fleet.post({**ASK, "n": 0}))[0] == 400
        assert all(replica.state == "up" for replica in fleet.gateway.replicas.values())

    run(pair, scenario)


def test_a_request_that_fails_in_the_middle_everywhere_is_not_tried_elsewhere(pair: list[Engine]) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    allowed = [token for letter in "ab" for token in pair[0].tokenizer.encode(letter)]
    body = {**ASK, "guided_regex": "ab[cd]{3}", "allowed_token_ids": allowed}

    async def scenario(fleet: Fleet) -> None:
        status, answer = await fleet.post(body)
        assert (status, answer["error"]["param"]) == (400, "guided_regex")
        assert answer["error"]["message"].startswith("guided_regex: cannot be followed any further")
        status, answer = await fleet.post({**ASK, "guided_json": {"type": "nothing"}})
        assert (status, answer["error"]["param"]) == (400, "guided_json")
        text, events = await fleet.stream({**body, "cache_salt": "other"})
        assert text == "ab"[: len(text)]
        assert events[-1]["error"]["param"] == "guided_regex"
        assert fleet.gateway.num_failovers == 0
        assert all(replica.state == "up" for replica in fleet.gateway.replicas.values())

    run(pair, scenario)


def test_requests_of_one_file_go_to_one_engine_and_hit_its_prefix_cache(pair: list[Engine]) -> None:
    async def scenario(fleet: Fleet) -> None:
        prompt = "def add(left, right):\n    return left + right\n"
        for number in range(6):
            await fleet.post({**ASK, "max_tokens": 2, "prompt": prompt + "x" * number, "user": "u", "supersede": "f"})
        assert sorted(engine.counters.prompt_tokens > 0 for engine in pair) == [False, True]
        assert sum(engine.counters.cached_tokens for engine in pair) > 60
        for number in range(12):
            await fleet.post({**ASK, "max_tokens": 1, "user": "u", "supersede": f"file {number}"})
        assert all(engine.counters.prompt_tokens > 0 for engine in pair)

    run(pair, scenario)


def test_failover_in_the_middle_of_a_completion_is_seamless(
    pair: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pair[0].generate(["def add("], SamplingParams(max_tokens=40))[0].text
    may_go_on = threading.Event()

    def is_streaming(engine: Engine) -> bool:
        return any(len(row.tokens) >= 3 for row in list(engine.scheduler.running))

    def held(engine: Engine, step: Callable[[], object]) -> object:
        if is_streaming(engine):
            may_go_on.wait(TIMEOUT_S)
        return step()

    for engine in pair:
        monkeypatch.setattr(engine, "step", partial(held, engine, engine.step))

    async def scenario(fleet: Fleet) -> None:
        for body in (ASK, {**ASK, "temperature": 1}):
            may_go_on.clear()
            task = asyncio.create_task(fleet.stream({**body, "user": "u", "supersede": "f"}))
            await until(lambda: any(map(is_streaming, pair)))  # some text was sent
            at = next(index for index, engine in enumerate(pair) if is_streaming(engine))
            server = fleet.engines[at]
            backend = server.handler.backend
            assert isinstance(backend, InProcessBackend)
            for job in list(backend.thread._jobs):
                job.on_update(RuntimeError("pulled the plug"))
            may_go_on.set()
            text, events = await task
            assert text
            if body is ASK:
                assert text == expected
            assert [event["choices"][0]["finish_reason"] for event in events if event.get("choices")][-1] is not None
            await until(lambda: all(replica.state == "up" for replica in fleet.gateway.replicas.values()))
        assert fleet.gateway.num_failovers == 2

    run(pair, scenario)


def test_disconnect_supersede_and_deadline_cancel_the_request_in_the_engine(
    pair: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in pair:
        slow_down(engine, monkeypatch)

    def idle() -> bool:
        return not any(engine.num_running or engine.num_waiting or engine.pool.num_used for engine in pair)

    async def scenario(fleet: Fleet) -> None:
        task = asyncio.create_task(fleet.stream(ASK))
        await until(lambda: not idle())
        task.cancel()
        await until(idle)
        older = asyncio.create_task(fleet.post({**ASK, "user": "u", "supersede": "f"}))
        await until(lambda: not idle())
        newer = asyncio.create_task(fleet.post({**ASK, "max_tokens": 2, "user": "u", "supersede": "f"}))
        assert (await older)[0] == 409
        assert (await newer)[0] == 200
        status, late = await fleet.post({**ASK, "timeout_ms": 200})
        assert (status, late["choices"][0]["finish_reason"]) == (200, "abort")
        assert late["usage"]["completion_tokens"] > 0  # counted by the engine
        await until(idle)

    run(pair, scenario)


def test_tenants_are_isolated_inside_the_engines(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()

    async def scenario(fleet: Fleet) -> None:
        body = {**ASK, "prompt": "def add(left, right):\n    return left", "max_tokens": 1}
        cached = []
        for key in ("key-of-a", "key-of-b", "key-of-a"):
            _, answer = await fleet.post(body, key)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[:2] == [0, 0]
        assert cached[2] > 0
        assert (await fleet.post(body, "key-of-c"))[0] == 401

    run([engine], scenario, keys=ApiKeys({"key-of-a": "a", "key-of-b": "b"}))


def test_a_gateway_without_engines_is_not_ready_and_waits_for_them() -> None:
    async def scenario(fleet: Fleet) -> None:
        status, answer = await fleet.post(ASK)
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        async with fleet.session.get(f"{fleet.server.url}/ready") as response:
            assert response.status == 503
        async with fleet.session.get(f"{fleet.server.url}/health") as response:
            assert response.status == 200

    run([], scenario, urls=("http://127.0.0.1:1",))


def test_a_gateway_with_a_wrong_key_is_not_ready_and_says_why(engine: Engine) -> None:
    keys = ApiKeys({"key-of-gateway": "gateway"})

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            running(InProcessBackend(engine), "127.0.0.1", 0, keys=keys) as one,
            running(Gateway([one.url], key="wrong-key"), "127.0.0.1", 0) as front,
            aiohttp.ClientSession() as session,
        ):
            for path, send in (("/ready", session.get), ("/v1/completions", session.post)):
                async with send(front.url + path, json={"prompt": "x"}) as response:
                    assert response.status == 503
                    assert "rejects the gateway's key (401)" in await response.text()

    asyncio.run(main())


def test_an_engine_that_is_not_ready_is_down_unless_it_drains() -> None:
    async def main() -> None:
        reply = {"status": "draining"}

        async def ready(_: web.Request) -> web.Response:
            return web.json_response(reply, status=503)

        app = web.Application()
        app.router.add_get("/ready", ready)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            replica = Replica(f"http://127.0.0.1:{runner.addresses[0][1]}", session)
            await replica.check()
            assert replica.state == "draining"
            reply["status"] = "the engine process has been silent for 4 s"
            await replica.check()  # its requests are retried elsewhere
            assert (replica.state, "silent" in replica.found) == ("down", True)
        await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["no.such.name.invalid", "a" * 70 + ".example"])
def test_a_name_without_an_address_is_resolved_again(name: str) -> None:
    async def scenario() -> None:
        gateway = Gateway([f"dns:{name}:8000"])
        await gateway.start()
        await gateway._set._resolve()
        assert gateway.models() == []
        await gateway.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_gateway_reports_phase_latencies(pair: list[Engine]) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.stream(ASK)
        families = fleet.gateway.metric_families()
        found = {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}
        phases = [f"lakh:request_{name}_time_seconds" for name in ("queue", "prefill", "decode", "inference")]
        assert [found[f"{name}_count"] for name in phases] == [1, 1, 1, 1]
        assert found[f"{phases[3]}_sum"] == pytest.approx(
            found[f"{phases[1]}_sum"] + found[f"{phases[2]}_sum"], abs=1e-5
        )

    run(pair, scenario)


def test_a_gateway_does_not_import_torch() -> None:
    apis = "lakh.server.api.http, lakh.server.api.grpc"
    rooms = f"lakh.cli.gateway, lakh.server.gateway.gateway, lakh.server.backends.completion_cache, {apis}"
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("engine", ["", "localhost", "127.0.0.1:8000", "ftp://a", "dns:name", "http://", "http://a:x"])
def test_an_invalid_address_is_a_user_error(engine: str) -> None:
    with pytest.raises(UserError):
        Gateway([engine])


@asynccontextmanager
async def other_engine(asked: list[dict[str, Any]], pieces: list[str]) -> AsyncIterator[str]:
    """An engine other than lakh: OpenAI's form, /health, no suffix, a pause between deltas."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body)
        if "suffix" in body:
            return web.json_response({"object": "error", "message": "suffix is not currently supported"}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, text in enumerate(pieces):
            reason = "length" if number == len(pieces) - 1 else None
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await asyncio.sleep(0.01)
        usage = {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    async def models(_: web.Request) -> web.Response:
        card = {"id": "other", "object": "model", "owned_by": "vllm", "max_model_len": 2048}
        return web.json_response({"object": "list", "data": [card]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models), web.get("/health", health)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_an_engine_without_suffix_gets_a_template_prompt_and_no_unknown_fields() -> None:
    asked: list[dict[str, Any]] = []

    async def main() -> None:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            other_engine(asked, ["a + ", "b\n", "print(", "1)"]) as url,
            gateway_of([], (url,), template=fim_template_of("starcoder")) as fleet,
        ):
            body = {"prompt": "def f(a, b):\n    return ", "suffix": "\n", "temperature": 0, "max_tokens": 8}
            _, answer = await fleet.post({**body, "stop_rule": "line", "user": "u", "supersede": "f", "order": "psm"})
            assert answer["choices"][0]["text"] == "a + b"  # the gateway applies the stop rule
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert asked[0]["prompt"] == "<fim_prefix>def f(a, b):\n    return <fim_suffix>\n<fim_middle>"
            assert not {"suffix", "stop_rule", "order", "supersede", "timeout_ms", "reuse"} & set(asked[0])
            _, answer = await fleet.post({**body, "order": "spm"})
            assert answer["choices"][0]["text"] == "a + b\nprint(1)"
            assert answer["usage"]["total_tokens"] == 9
            assert asked[1]["prompt"].startswith("<fim_prefix><fim_suffix>\n<fim_middle>def f")
            await fleet.post({**body, "temperature": 1})
            assert isinstance(asked[2]["seed"], int)

    asyncio.run(main())


def test_a_missing_template_is_reported_to_the_client() -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), other_engine([], ["x"]) as url, gateway_of([], (url,)) as fleet:
            status, answer = await fleet.post({**ASK, "suffix": "\n"})
            assert (status, answer["error"]["message"]) == (400, "suffix is not currently supported")

    asyncio.run(main())
