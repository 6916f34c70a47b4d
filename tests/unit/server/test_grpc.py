"""The gRPC API: the same completions in chunks; deadlines and cancellation reach the engine; status codes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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
from lakh.server.api.server import HttpServer
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams

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


def test_a_deadline_and_a_cancelled_call_free_their_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

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
