"""Any input on either port gets a 4xx or a gRPC status: never a 5xx, a traceback or a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api import openapi
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.server import MAX_BODY_BYTES, running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.prompts.chat_template import ChatTemplate
from lakh.server.store import MemoryCacheStore

from .tool_templates import FORMS

TIMEOUT_S = 60.0
GOOD = {"prompt": "x", "max_tokens": 1}


@contextlib.contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[tuple[str, str]]:
    """HTTP and gRPC in a thread: (URL, gRPC address)."""
    addresses: list[tuple[str, str]] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        store = MemoryCacheStore()
        backend = InProcessBackend(engine)
        async with (
            running(backend, "127.0.0.1", 0, store=store, **options) as server,
            grpc_api.running(server.handler, "127.0.0.1", 0) as address,
        ):
            addresses.append((server.url, address))
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(TIMEOUT_S)


def run(scenario: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)  # after malformed input a server may close the connection
        async with (
            asyncio.timeout(4 * TIMEOUT_S),
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        ):
            await scenario(session)

    asyncio.run(main())


@pytest.mark.slow
def test_a_fuzzer_finds_no_deviation_from_the_openapi_document(
    make_engine: Callable[..., Engine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(context=512)
    pytest.importorskip("schemathesis", reason="pip install schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run"),
        *("--checks", checks, "--max-examples", "25", "--seed", "1", "--phases", "coverage,fuzzing"),
        *("--request-timeout", "30", "--no-color", "--mode", "all"),
    ]
    engine.prompts.chat_template = ChatTemplate(FORMS["hermes"].template, {})  # for messages and tools
    with serving(engine) as (url, _):
        done = subprocess.run(
            [*command, f"{url}/openapi.json"], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Traceback" not in caplog.text


def test_every_path_of_the_openapi_document_is_served(engine: Engine) -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        for path, verbs in openapi.document()["paths"].items():
            for verb in verbs:
                async with session.request(verb, url + path.format(model="tiny"), data=b"{") as response:
                    assert response.status in ({400} if verb == "post" else {200}), path

    with serving(engine) as (url, _):
        run(scenario)


async def exchange(host: str, port: int, data: bytes) -> bytes:
    """Send bytes, half-close, and read until the server closes the connection or is silent."""
    reader, writer = await asyncio.open_connection(host, port)
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
        writer.write_eof()
    got = b""
    with contextlib.suppress(OSError, TimeoutError):
        got = await asyncio.wait_for(reader.read(1 << 20), 5.0)
    writer.close()
    return got


def test_random_bytes_on_both_ports_break_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    blobs = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(12)]
    blobs += [
        head + b"Content-Length: 5\r\n\r\n" + b"\xff" * 5,
        head + b"Content-Length: -5\r\n\r\n",
        head + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Authorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
        head + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # the start of a TLS handshake
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(500),
        b"\x00" * 10_000,
    ]

    async def scenario(session: aiohttp.ClientSession) -> None:
        for address in (url.removeprefix("http://"), grpc_at):
            host, _, port = address.rpartition(":")
            got = await asyncio.gather(*[exchange(host, int(port), blob) for blob in blobs])
            for answer in got:
                assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")), answer[:300]
                assert b"Traceback" not in answer
        async with session.post(f"{url}/v1/completions", json=GOOD) as response:
            assert response.status == 200  # the server still works
        async with grpc.aio.insecure_channel(grpc_at) as channel:
            assert [chunk async for chunk in complete_on(channel)(proto.CompleteRequest(**GOOD), timeout=TIMEOUT_S)]

    with serving(engine) as (url, grpc_at):
        run(scenario)
    assert "Traceback" not in caplog.text


def complete_on(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(
        f"/{proto.SERVICE}/Complete",
        request_serializer=proto.CompleteRequest.SerializeToString,
        response_deserializer=proto.CompleteChunk.FromString,
    )


def test_a_body_of_100_megabytes_is_rejected_without_being_stored(engine: Engine) -> None:
    sent = [0]

    async def parts() -> Any:
        part = b'{"prompt": "' + b"x" * (1 << 20)
        for _ in range(100):
            sent[0] += len(part)
            yield part

    async def scenario(session: aiohttp.ClientSession) -> None:
        for data, headers in ((parts(), {}), (b"x" * (MAX_BODY_BYTES + 1), {}), (b"{}", {"Content-Encoding": "gzip"})):
            try:
                async with session.post(f"{url}/v1/completions", data=data, headers=headers) as response:
                    assert response.status in (400, 413)
            except aiohttp.ClientError:  # rejected and disconnected while it still sent: also fine
                pass
        async with session.post(f"{url}/v1/completions", json=GOOD) as response:
            assert response.status == 200
        async with grpc.aio.insecure_channel(grpc_at) as channel:
            request = proto.CompleteRequest(prompt="x" * (100 << 20))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [chunk async for chunk in complete_on(channel)(request, timeout=TIMEOUT_S)]
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    with serving(engine) as (url, grpc_at):
        run(scenario)


def test_bad_keys_bad_text_and_past_deadlines_have_their_status(engine: Engine) -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        good = {"Authorization": "Bearer key-of-a"}
        for key in ("Bearer", "Bearer ", "Basic !!!not base64!!!", "Bearer \udcff", "key-of-a", "Bearer key-of-a x"):
            async with session.post(f"{url}/v1/completions", json=GOOD, headers={"Authorization": key}) as response:
                assert response.status == 401, key
        for body in (b'{"prompt": "\xff\xfe"}', b"\xef\xbb\xbf{", b'{"prompt": "\\ud800"}', os.urandom(64)):
            async with session.post(f"{url}/v1/completions", data=body, headers=good) as response:
                assert response.status == 400
        late = {**GOOD, "timeout_ms": 1e-9}
        async with session.post(f"{url}/v1/completions", json=late, headers=good) as response:
            assert (await response.json())["choices"][0]["finish_reason"] == "abort"
        async with grpc.aio.insecure_channel(grpc_at) as channel:
            complete, request = complete_on(channel), proto.CompleteRequest(**GOOD)
            bad = [
                ((("authorization", "Bearer none"),), TIMEOUT_S, grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", "!!!"), ("key-bin", b"\xff\x00")), TIMEOUT_S, grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", "Bearer key-of-a"),), 0.0, grpc.StatusCode.DEADLINE_EXCEEDED),
            ]
            for metadata, timeout_s, status in bad:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    _ = [chunk async for chunk in complete(request, metadata=metadata, timeout=timeout_s)]
                assert caught.value.code() == status

    with serving(engine, keys=ApiKeys({"key-of-a": "a"})) as (url, grpc_at):
        run(scenario)
