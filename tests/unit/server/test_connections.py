"""Connections that hold a descriptor without a request are closed, and probes are answered at the limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from lakh.server.api.connections import ConnectionLimits, log_rarely
from lakh.server.api.server import HttpServer, running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine

TIMEOUT_S = 30.0
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def run(
    engine: Engine, scenario: Callable[[HttpServer], Awaitable[None]], limit: ConnectionLimits, **more: Any
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(TIMEOUT_S),
            running(InProcessBackend(engine), "127.0.0.1", 0, connections=limit, **more) as server,
        ):
            await scenario(server)

    asyncio.run(main())


@asynccontextmanager
async def connection(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-", GET])
def test_a_connection_without_a_request_is_closed(engine: Engine, sent: bytes) -> None:
    async def scenario(server: HttpServer) -> None:
        async with connection(server) as (reader, writer):
            writer.write(sent)
            answer = await reader.read()  # until the server closes
            assert answer == b"" or answer.startswith(b"HTTP/1.1 200 OK")

    run(engine, scenario, ConnectionLimits(100, idle_s=0.2))


def test_a_header_that_arrives_byte_by_byte_is_not_waited_for(engine: Engine) -> None:
    async def scenario(server: HttpServer) -> None:
        async with connection(server) as (reader, writer):
            closed = asyncio.create_task(reader.read())
            while not closed.done():
                writer.write(b"X")
                await asyncio.sleep(0.02)
            assert (await closed).startswith((b"", b"HTTP/1.1 400"))

    run(engine, scenario, ConnectionLimits(100, idle_s=0.2))


def test_a_stream_is_not_idle(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    step = engine.step

    def slow_step() -> Any:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)

    async def scenario(server: HttpServer) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "def add(", "max_tokens": 16, "min_tokens": 16, "stream": True, "temperature": 0}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")

    run(engine, scenario, ConnectionLimits(100, idle_s=0.2))


def test_new_connections_replace_the_ones_that_are_idle_longest(engine: Engine) -> None:
    async def scenario(server: HttpServer) -> None:
        opened = [connection(server) for _ in range(40)]
        streams = [await one.__aenter__() for one in opened]
        for reader, writer in streams[-2:]:  # the newest ones are served
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await streams[0][0].read() == b""  # the oldest one was closed
        for one in opened:
            await one.__aexit__(None, None, None)

    run(engine, scenario, ConnectionLimits(8))


def test_probes_are_answered_while_every_connection_is_in_use(engine: Engine) -> None:
    limit = ConnectionLimits(1, reserved=3)

    async def scenario(server: HttpServer) -> None:
        busy = object()
        with limit.request(busy, is_probe=False):  # a stream that lasts
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{server.url}/health") as response:
                    assert response.status == 200
                async with session.post(f"{server.url}/v1/completions", json={"prompt": "x"}) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (503, "too_many_clients")
                    assert response.headers["Connection"] == "close"
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response,
        ):
            assert response.status == 200

    run(engine, scenario, limit)


@pytest.mark.parametrize("max_files", [64, 256, 1024, 1 << 16])
def test_connections_leave_descriptors_for_the_process(max_files: int) -> None:
    limit = ConnectionLimits.within(max_files)
    assert limit.most + 30 <= max_files  # a server without connections has 20 to 30 open files
    assert limit.most >= max_files // 2 - 64


def test_a_server_without_descriptors_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    try:
        with caplog.at_level(logging.ERROR):
            for _ in range(1000):
                error = OSError(24, "Too many open files")
                log_rarely(loop, {"message": "socket.accept() out of system resource", "exception": error})
    finally:
        loop.close()
    assert len(caplog.records) == 1
    assert "ulimit -n" in caplog.text


def test_web_pages_of_the_given_origin_may_use_the_api(engine: Engine) -> None:
    origin = "https://editor.example"

    async def scenario(server: HttpServer) -> None:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        async with aiohttp.ClientSession() as session:
            async with session.options(f"{server.url}/v1/completions", headers=asked) as response:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Origin"] == origin
                assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
            client = {**asked, "Access-Control-Request-Headers": "authorization,x-stainless-lang"}  # of OpenAI
            async with session.options(f"{server.url}/v1/completions", headers=client) as response:
                assert "x-stainless-lang" in response.headers["Access-Control-Allow-Headers"]
            for body in ({"prompt": "x", "max_tokens": 1}, {"prompt": "x", "max_tokens": 1, "stream": True}, {}):
                async with session.post(f"{server.url}/v1/completions", json=body) as response:
                    assert response.headers["Access-Control-Allow-Origin"] == origin  # of errors too
                    await response.read()

    run(engine, scenario, ConnectionLimits(100), cors=origin)


def test_other_pages_may_not_use_the_api_by_default(engine: Engine) -> None:
    async def scenario(server: HttpServer) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response,
        ):
            assert "Access-Control-Allow-Origin" not in response.headers

    run(engine, scenario, ConnectionLimits(100))
