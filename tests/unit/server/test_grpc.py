"""The gRPC API: the same completions in chunks; deadlines and cancellation reach the engine; status codes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api import server as api_server
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.dialects.openai import OPENAI
from lakh.server.api.server import HttpServer
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.request import parse

TIMEOUT_S = 30.0


def run(
    engine: Engine, scenario: Callable[[Any, grpc.aio.Channel, HttpServer], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            api_server.running(InProcessBackend(engine), "127.0.0.1", 0, **options) as server,
            grpc_api.running(server.handler, "127.0.0.1", 0) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            complete = channel.unary_stream(
                f"/{proto.SERVICE}/Complete",
                request_serializer=proto.CompleteRequest.SerializeToString,
                response_deserializer=proto.CompleteChunk.FromString,
            )
            await scenario(complete, channel, server)

    asyncio.run(main())


def test_a_stream_has_the_engines_completion(engine: Engine) -> None:
    expected = engine.generate(["def add("], SamplingParams(max_tokens=30))[0]

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        request = proto.CompleteRequest(prompt="def add(", max_tokens=30, temperature=0, logprobs=2)
        chunks = [chunk async for chunk in complete(request)]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert [token for chunk in chunks for token in chunk.tokens] == list(expected.tokens)
        assert len([item for chunk in chunks for item in chunk.logprobs]) == len(expected.tokens)
        usage = chunks.pop().usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, len(expected.tokens))
        assert [chunk.finish_reason for chunk in chunks][-1] == expected.finish_reason
        assert len(chunks) > 3
        infill = proto.CompleteRequest(prompt="def add(", suffix="\n", max_tokens=4, temperature=0, order="spm")
        assert [chunk async for chunk in complete(infill)]

    run(engine, scenario)


REFUSED = [
    ({"prompt": "x", "max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt": "x", "max_tokens": 5000}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt": "x", "temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt": "x" * 3000}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt": "x", "prompt_ids": [8]}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt_ids": [100000]}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt": "x", "model": "gpt-9"}, grpc.StatusCode.NOT_FOUND),
    ({"prompt": "x", "prompts": [{"text": "y"}]}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompts": [{"text": "y", "ids": [8]}]}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompts": [{"text": "y"}, {"ids": [8]}]}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompts": [{"text": "y"}] * 65}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"prompt": "x" * (5 << 20)}, grpc.StatusCode.RESOURCE_EXHAUSTED),
]


def test_errors_have_the_corresponding_grpc_status(engine: Engine) -> None:
    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        for fields, status in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [chunk async for chunk in complete(proto.CompleteRequest(**fields), timeout=TIMEOUT_S)]
            assert caught.value.code() == status, fields
            assert "Traceback" not in (caught.value.details() or "")
        raw = channel.unary_unary(f"/{proto.SERVICE}/Complete")  # bytes that are not a message
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\xff\xfe\x00garbage", timeout=TIMEOUT_S)
        assert [
            chunk async for chunk in complete(proto.CompleteRequest(prompt="x", max_tokens=2))
        ]  # the server still works

    run(engine, scenario)


# Of each field a value that is not its default.
GIVEN: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 2**62,
    "stop": ["END"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logit_bias": {9: -2.5, 0: 1},
    "allowed_token_ids": [8, 9],
    "bad_words": ["TODO"],
    "logprobs": 2,
    "prompt_logprobs": 1,
    "guided_regex": "a+",
}
ALWAYS = {"stream", "stream_options"}  # a gRPC response is a stream with usage


def test_every_sampling_parameter_has_a_field() -> None:
    def sampling(**fields: Any) -> dict[str, Any]:
        body = grpc_api._as_openai(proto.CompleteRequest(prompt="x", **fields))
        return dataclasses.asdict(parse(body).sampling)

    default = sampling()
    changed = {name for field, value in GIVEN.items() for name, new in sampling(**{field: value}).items()
               if new != default[name]}  # fmt: skip
    assert changed == {field.name for field in dataclasses.fields(SamplingParams)}
    assert sampling(logit_bias={9: -2.5, 0: 1})["logit_bias"] == ((0, 1.0), (9, -2.5))
    assert sampling(stop_token_ids=[9, 8])["stop_token_ids"] == (9, 8)


def test_every_field_of_completions_over_http_has_one() -> None:
    fields = {field.name for field in proto.CompleteRequest.DESCRIPTOR.fields}
    of_http = set(OPENAI.request_schema["properties"])
    assert of_http - fields == ALWAYS | {"response_format", "structured_outputs"}  # guided_* say the same
    assert fields - of_http == {"prompt_ids", "prompts"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {-5: 1.0}}, "logit_bias: is not an object such as"),
    ({"logit_bias": {5: 101.0}}, "logit_bias: 101.0 is not from -100 to 100"),
    ({"logit_bias": {5: float("nan")}}, "logit_bias: nan is not from -100 to 100"),
    ({"logit_bias": dict.fromkeys(range(5000), 1.0)}, "logit_bias: .* at most 4096 ids"),
    ({"logit_bias": {100000: 1.0}}, "logit_bias: .*100000"),
    ({"stop_token_ids": [-1]}, "stop_token_ids: .* is not a list of token ids; give whole numbers from 0"),
    ({"stop_token_ids": [100000]}, "stop_token_ids: .*100000"),
    ({"allowed_token_ids": [100000]}, "allowed_token_ids: .*100000"),
    ({"bad_words": [""]}, "bad_words: .* is not a list of words; give words such as"),
    ({"min_p": 2.0}, "min_p: 2.0 is not a number from 0 to 1"),
    ({"min_tokens": 17}, "min_tokens: 17 is not a whole number from 0 to 16"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not a number from 0.01 to 2"),
    ({"presence_penalty": 3.0}, "presence_penalty: 3.0"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty: inf"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: 21 is not from 0 to 20"),
    ({"timeout_ms": 0.0}, "timeout_ms: 0.0 is not from 0 to 3600000"),
    ({"generation_ms": -1.0}, "generation_ms: -1.0"),
    ({"echo": True, "suffix": "y"}, "echo: cannot be combined with messages, suffix"),
    ({"parse_special": True, "input_extra": [{"text": "y"}]}, "parse_special: "),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice: .* give only one of them"),
]


def test_wrong_sampling_parameters_are_refused_with_the_reason(engine: Engine) -> None:
    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        for fields, message in WRONG:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [chunk async for chunk in complete(proto.CompleteRequest(prompt="x", **fields), timeout=TIMEOUT_S)]
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
            assert re.search(message, caught.value.details() or ""), (fields, caught.value.details())

    run(engine, scenario)


TEXTS = ("", "x", "line", "spm", "tiny", "\0", "<|endoftext|>", "{", "a*", '{"type": "object"}', "é" * 300)
DOUBLES = (0.0, -1.0, 1.0, 0.5, 200.0, 1e-300, float("nan"), float("inf"))
INTS = (0, -1, 1, 2, 7, 2**31 - 1, -(2**31))


def any_value(field: Any, rng: random.Random) -> Any:
    if field.name == "logit_bias":
        return {rng.choice(INTS): rng.choice(DOUBLES) for _ in range(rng.randint(0, 3))}
    if field.name in ("prompts", "input_extra"):
        return [{"text": rng.choice(TEXTS)} for _ in range(rng.randint(0, 3))]
    of_type = {
        field.TYPE_DOUBLE: DOUBLES,
        field.TYPE_INT32: INTS,
        field.TYPE_INT64: (*INTS, 2**63 - 1),
        field.TYPE_BOOL: (True, False),
        field.TYPE_STRING: TEXTS,
    }[field.type]
    is_list = not isinstance(getattr(proto.CompleteRequest(), field.name), int | float | str)
    return [rng.choice(of_type) for _ in range(rng.randint(0, 4))] if is_list else rng.choice(of_type)


def test_requests_with_any_values_are_answered_or_refused(engine: Engine) -> None:
    rng = random.Random(1)
    fields = list(proto.CompleteRequest.DESCRIPTOR.fields)
    found: Counter[Any] = Counter()

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        for _ in range(200):
            values = {field.name: any_value(field, rng) for field in rng.sample(fields, rng.randint(0, 5))}
            request = proto.CompleteRequest(**{"prompt": "def f(", "max_tokens": 3, **values})
            try:
                _ = [chunk async for chunk in complete(request, timeout=TIMEOUT_S)]
                found["answered"] += 1
            except grpc.aio.AioRpcError as error:
                found[error.code()] += 1
        assert not engine.pool.num_used

    run(engine, scenario)
    assert set(found) <= {"answered", grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert min(found["answered"], found[grpc.StatusCode.INVALID_ARGUMENT]) > 20


def test_token_rules_hold_over_grpc(engine: Engine) -> None:
    plain = engine.generate(["def add("], SamplingParams(max_tokens=12))[0]

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        async def tokens(**fields: Any) -> list[int]:
            request = proto.CompleteRequest(prompt="def add(", max_tokens=12, temperature=0, **fields)
            return [token async for chunk in complete(request) for token in chunk.tokens]

        allowed = [id_ for id_ in range(20, 40) if id_ not in plain.tokens][:3]
        assert set(await tokens(allowed_token_ids=allowed)) <= set(allowed)
        first = plain.tokens[0]
        assert first not in await tokens(logit_bias={first: -100})
        assert await tokens(logit_bias={allowed[0]: 100}) != list(plain.tokens)
        stop = plain.tokens[4]
        assert await tokens(stop_token_ids=[stop]) == list(plain.tokens[: plain.tokens.index(stop) + 1])
        assert await tokens(repetition_penalty=2.0, presence_penalty=2.0) != list(plain.tokens)

    run(engine, scenario)


def test_echo_and_log_probabilities_of_prompts(engine: Engine) -> None:
    text = "def add(a"
    ids = list(engine.prompts.encode_prompt(text))

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        request = proto.CompleteRequest(prompt=text, max_tokens=2, temperature=0, echo=True, logprobs=2)
        chunks = [chunk async for chunk in complete(request)]
        generated = [token for chunk in chunks for token in chunk.tokens]
        scores = [score for chunk in chunks for score in chunk.logprobs]
        assert "".join(chunk.text for chunk in chunks).startswith(text)
        assert [score.token for score in scores] == ids + generated
        assert [score.HasField("logprob") for score in scores] == [False] + [True] * (len(scores) - 1)
        assert all(score.top for score in scores[1:])  # tokens of the same text are one
        assert not scores[0].top
        for score in scores[1:]:
            assert score.logprob <= max(one.logprob for one in score.top)
        assert not any(chunk.prompt_tokens for chunk in chunks)
        request = proto.CompleteRequest(prompt=text, max_tokens=3, return_token_ids=True)
        first, *others = [chunk async for chunk in complete(request)]
        assert list(first.prompt_tokens) == ids
        assert not any(chunk.prompt_tokens for chunk in others)
        for max_tokens in (0, 2):
            request = proto.CompleteRequest(
                prompts=[{"text": text}, {"text": "x"}], max_tokens=max_tokens, temperature=0, prompt_logprobs=3
            )
            chunks = [chunk async for chunk in complete(request)]
            first = next(chunk for chunk in chunks if chunk.index == 0)
            assert len(first.prompt_logprobs) == len(ids)
            assert not first.prompt_logprobs[0].candidates
            for own, found in zip(ids[1:], first.prompt_logprobs[1:], strict=True):
                assert own in [one.token for one in found.candidates]
                assert min(one.rank for one in found.candidates) == 1
            assert {chunk.index for chunk in chunks[:-1]} == {0, 1}
            assert sum(bool(chunk.prompt_logprobs) for chunk in chunks) == 2

    run(engine, scenario)


def test_a_time_limit_ends_with_the_text_there_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda segments: time.sleep(0.02) or forward(segments))

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        request = proto.CompleteRequest(prompt="def add(", max_tokens=80, temperature=0, timeout_ms=200)
        for deadline_s in (TIMEOUT_S, None):
            chunks = [chunk async for chunk in complete(request, timeout=deadline_s)]
            assert chunks[-2].finish_reason == "abort"
            assert 0 < chunks[-1].usage.completion_tokens < 80

    run(engine, scenario)


def test_a_deadline_and_a_cancelled_call_free_their_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda segments: time.sleep(0.02) or forward(segments))

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        request = proto.CompleteRequest(prompt="def add(", max_tokens=80, temperature=0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [chunk async for chunk in complete(request, timeout=0.2)]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        call = complete(request)
        await call.read()
        call.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while engine.num_running or engine.num_waiting or engine.pool.num_used:
                await asyncio.sleep(0.01)

    run(engine, scenario)


def test_keys_are_required_and_identify_the_tenant(engine: Engine) -> None:
    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        request = proto.CompleteRequest(prompt="def add(", max_tokens=2)
        for metadata in ((), (("authorization", "Bearer wrong-key"),), (("authorization", "secret-1"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [chunk async for chunk in complete(request, metadata=metadata)]
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer secret-1"),)
        assert [chunk async for chunk in complete(request, metadata=good)]
        models = channel.unary_unary(
            f"/{proto.SERVICE}/Models",
            request_serializer=proto.ModelsRequest.SerializeToString,
            response_deserializer=proto.ModelsReply.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await models(proto.ModelsRequest())
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert [model.id for model in (await models(proto.ModelsRequest(), metadata=good)).models] == ["tiny"]

    run(engine, scenario, keys=ApiKeys({"secret-1": "a"}))


def test_health_answers_and_reflection_names_the_service(engine: Engine) -> None:
    pytest.importorskip("grpc_reflection", reason="pip install grpcio-reflection")
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def scenario(complete: Any, channel: grpc.aio.Channel, server: HttpServer) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "ready", proto.SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        models = channel.unary_unary(
            f"/{proto.SERVICE}/Models",
            request_serializer=proto.ModelsRequest.SerializeToString,
            response_deserializer=proto.ModelsReply.FromString,
        )
        reply = await models(proto.ModelsRequest(), timeout=TIMEOUT_S)
        assert [model.id for model in reply.models] == ["tiny"]
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for answer in stub.ServerReflectionInfo(asked, timeout=TIMEOUT_S):
            named = {service.name for service in answer.list_services_response.service}
            assert {proto.SERVICE, "grpc.health.v1.Health"} <= named
            break

    run(engine, scenario)


def test_the_descriptor_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    folder = Path(proto.__file__).parent
    made = tmp_path / "made.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(folder), f"--descriptor_set_out={made}"]
    subprocess.run([*command, "completion.proto"], check=True, timeout=120)
    assert made.read_bytes() == (folder / "completion.binpb").read_bytes()
