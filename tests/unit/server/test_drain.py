"""The end of a server: both faces say so, take nothing new, and finish what they have; and ports that are taken."""

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

PATIENCE_S = 30.0


def lakh(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine takes no step before it is set."""
    gate, forward = threading.Event(), engine.runner.forward

    def gated(segments: Any) -> Any:
        assert gate.wait(PATIENCE_S), "the test gave no permit"
        return forward(segments)

    monkeypatch.setattr(engine.runner, "forward", gated)
    return gate


class Faces:
    """Both faces of one engine, as `lakh serve` has them, and their clients."""

    def __init__(self, backend: InProcessBackend, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self.backend, self.channel, self.session = backend, channel, session

    async def over_grpc(self) -> list[Any]:
        complete = self.channel.unary_stream(
            f"/{proto.SERVICE}/Complete",
            request_serializer=proto.CompleteRequest.SerializeToString,
            response_deserializer=proto.CompleteChunk.FromString,
        )
        request = proto.CompleteRequest(prompt="def add(", max_tokens=3, temperature=0)
        return [chunk async for chunk in complete(request, timeout=PATIENCE_S)]

    async def over_http(self) -> tuple[int, Any]:
        body = {"prompt": "def add(", "max_tokens": 3, "temperature": 0}
        async with self.session.post("/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def is_ready(self) -> bool:
        asked = health_pb2.HealthCheckRequest(service="ready")
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(asked)
        async with self.session.get("/ready") as response:
            return response.status == 200 or answer.status == health_pb2.HealthCheckResponse.SERVING


def serve(engine: Engine, story: Callable[[Faces], Awaitable[None]]) -> None:
    """Serve until the story has asked to stop, by a signal."""

    async def main() -> None:
        backend = InProcessBackend(engine)
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        told = lambda url, address: ready.set_result((url, address))  # noqa: E731
        serving = asyncio.create_task(
            api_server.serve_until_signal(
                backend, "127.0.0.1", 0, on_ready=told, grpc_address=("127.0.0.1", 0), drain_s=PATIENCE_S
            )
        )
        url, address = await ready
        async with grpc.aio.insecure_channel(address) as channel, aiohttp.ClientSession(url) as session:
            await story(Faces(backend, channel, session))
        await serving

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_asked_to_stop_both_faces_finish_their_streams_and_take_no_others(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_api, "STOP_GRACE_S", 0.0)  # nobody depends on it while there is time to drain

    async def story(faces: Faces) -> None:
        at_work = [asyncio.create_task(faces.over_grpc()), asyncio.create_task(faces.over_http())]
        await until(lambda: faces.backend.num_running + faces.backend.num_waiting == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        while await faces.is_ready():
            await asyncio.sleep(0.01)
        assert (await faces.over_http())[0] == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await faces.over_grpc()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not any(task.done() for task in at_work)
        gate.set()
        chunks, (status, answer) = await at_work[0], await at_work[1]
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)

    serve(engine, story)


def test_asked_twice_it_does_not_wait_for_what_is_at_work(engine: Engine, gate: threading.Event) -> None:
    async def story(faces: Faces) -> None:
        at_work = asyncio.create_task(faces.over_http())
        await until(lambda: faces.backend.num_running + faces.backend.num_waiting == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        while await faces.is_ready():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: bool(faces.backend.thread._cancelled))  # it is to leave
        gate.set()
        status, answer = await at_work
        assert status == 503 or answer["choices"][0]["finish_reason"] == "abort"

    serve(engine, story)


def test_a_port_that_is_taken_is_told_before_a_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_an_address_of_elsewhere_is_refused(host: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        check_free("--http", host, 0)


def test_a_second_server_does_not_share_the_first_ones_grpc_port(engine: Engine) -> None:
    async def story() -> None:
        handler = RequestHandler(InProcessBackend(engine))
        async with grpc_api.running(handler, "127.0.0.1", 0) as address:
            port = int(address.rpartition(":")[2])
            with pytest.raises(UserError, match="in use"):
                async with grpc_api.running(handler, "127.0.0.1", port):
                    pass
        await handler.backend.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
