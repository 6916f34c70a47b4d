"""Draining over HTTP and gRPC, and ports in use."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lakh.cli.main import main
from lakh.errors import UserError
from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api import server as api_server
from lakh.server.api.listen import check_free
from lakh.server.api.request_handler import RequestHandler
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine

TIMEOUT_S = 30.0


def lakh(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine runs no step before it is set."""
    gate, forward = threading.Event(), engine.runner.forward

    def gated(segments: Any) -> Any:
        assert gate.wait(TIMEOUT_S), "the test gave no permit"
        return forward(segments)

    monkeypatch.setattr(engine.runner, "forward", gated)
    return gate


class Apis:
    """HTTP and gRPC of one engine, as in `lakh serve`, and their clients."""

    def __init__(self, backend: InProcessBackend, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self.backend, self.channel, self.session = backend, channel, session

    async def over_grpc(self) -> list[Any]:
        complete = self.channel.unary_stream(
            f"/{proto.SERVICE}/Complete",
            request_serializer=proto.CompleteRequest.SerializeToString,
            response_deserializer=proto.CompleteChunk.FromString,
        )
        request = proto.CompleteRequest(prompt="def add(", max_tokens=3, temperature=0)
        return [chunk async for chunk in complete(request, timeout=TIMEOUT_S)]

    async def over_http(self) -> tuple[int, Any]:
        body = {"prompt": "def add(", "max_tokens": 3, "temperature": 0}
        async with self.session.post("/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def is_ready(self) -> bool:
        asked = health_pb2.HealthCheckRequest(service="ready")
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(asked)
        async with self.session.get("/ready") as response:
            return response.status == 200 or answer.status == health_pb2.HealthCheckResponse.SERVING


def serve(engine: Engine, scenario: Callable[[Apis], Awaitable[None]]) -> None:
    """Serve until the scenario sends a stop signal."""

    async def main() -> None:
        backend = InProcessBackend(engine)
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        on_ready = lambda url, address: ready.set_result((url, address))  # noqa: E731
        serving = asyncio.create_task(
            api_server.serve_until_signal(
                backend, "127.0.0.1", 0, on_ready=on_ready, grpc_address=("127.0.0.1", 0), drain_s=TIMEOUT_S
            )
        )
        url, address = await ready
        async with grpc.aio.insecure_channel(address) as channel, aiohttp.ClientSession(url) as session:
            await scenario(Apis(backend, channel, session))
        await serving

    asyncio.run(asyncio.wait_for(main(), 2 * TIMEOUT_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_stop_signal_finishes_running_streams_and_rejects_new_ones(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing: list[bool] = []

    def watch(**options: Any) -> grpc.aio.Server:
        server = open_server(**options)
        stop = server.stop

        def observed(grace: float | None) -> Awaitable[None]:
            closing.append(gate.is_set())
            return stop(grace)

        monkeypatch.setattr(server, "stop", observed)
        return server

    open_server = grpc.aio.server
    monkeypatch.setattr(grpc.aio, "server", watch)

    async def scenario(apis: Apis) -> None:
        at_work = [asyncio.create_task(apis.over_grpc()), asyncio.create_task(apis.over_http())]
        await until(lambda: apis.backend.num_running + apis.backend.num_waiting == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        while await apis.is_ready():
            await asyncio.sleep(0.01)
        assert (await apis.over_http())[0] == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await apis.over_grpc()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not any(task.done() for task in at_work)
        gate.set()
        chunks, (status, answer) = await at_work[0], await at_work[1]
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)

    serve(engine, scenario)
    assert closing == [True], "gRPC stops after the running requests, not with a grace for them"


def test_a_second_signal_ends_running_requests(engine: Engine, gate: threading.Event) -> None:
    async def scenario(apis: Apis) -> None:
        at_work = asyncio.create_task(apis.over_http())
        await until(lambda: apis.backend.num_running + apis.backend.num_waiting == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        while await apis.is_ready():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: bool(apis.backend.thread._cancelled))  # its cancellation is queued
        gate.set()
        status, answer = await at_work
        assert status == 503 or answer["choices"][0]["finish_reason"] == "abort"

    serve(engine, scenario)


def test_a_port_in_use_is_reported_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lakh("serve", "no-such-model", "--http", f":{port}") == 2
        assert lakh("serve", "no-such-model", "--http", ":0", "--grpc", f":{port}") == 2
    assert capsys.readouterr().err.count("the port is in use") == 2


@pytest.mark.parametrize(
    ("host", "found"), [("no.such.host.invalid", "not an address"), ("192.0.2.1", "not an address")]
)
def test_an_address_of_another_machine_is_rejected(host: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        check_free("--http", host, 0)


def test_a_second_server_does_not_share_the_first_ones_grpc_port(engine: Engine) -> None:
    async def scenario() -> None:
        handler = RequestHandler(InProcessBackend(engine))
        async with grpc_api.running(handler, "127.0.0.1", 0) as address:
            port = int(address.rpartition(":")[2])
            with pytest.raises(UserError, match="in use"):
                async with grpc_api.running(handler, "127.0.0.1", port):
                    pass
        await handler.backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
