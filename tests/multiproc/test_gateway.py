"""A gateway with real engine processes that are killed and stopped under load, and a Redis server that is restarted.

A client of these tests never waits longer than its deadline, and never sees an error that a second engine could have
spared it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]

START_S = 120.0
DEADLINE_S = 20.0  # of every request
SLACK_S = 10.0  # a busy machine's, beyond the deadline
CLIENTS = 8


class Process:
    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "lakh", *words, "--http", "127.0.0.1:0", "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=START_S)[1]
        self.url: str = json.loads(line)["url"]
        return self.url

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> str:
        """Terminate it and return its output."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.communicate(timeout=60)[1]
        finally:
            self.process.kill()


@contextlib.contextmanager
def scene(served_model: Path, *options: str) -> Iterator[tuple[list[Process], Process]]:
    """Two engines behind a gateway."""
    engines = [Process("serve", str(served_model), "--threads", "1", "--cache", "off") for _ in range(2)]
    gateway = None
    try:
        urls = [engine.ready() for engine in engines]
        gateway = Process("gateway", *urls, *options)
        gateway.ready()
        yield engines, gateway
    finally:
        for process in [*engines, *([gateway] if gateway else [])]:
            talk = process.stop()
            assert "Traceback" not in talk, talk


@contextlib.asynccontextmanager
async def crowd(url: str) -> AsyncIterator[tuple[Counter[str], list[float]]]:
    """Clients that send requests while the block runs; (outcome, seconds) of each request."""
    ends: Counter[str] = Counter()
    took_s: list[float] = []
    is_over = False
    text = Path(__file__).read_text()
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S + SLACK_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def client(number: int) -> None:
            asked = 0
            while not is_over:
                asked += 1
                start = (number * 977 + asked * 131) % (len(text) - 200)
                body = {
                    "prompt": text[start : start + 120],
                    "max_tokens": 24,
                    "temperature": number % 2,
                    "stream": number % 3 == 0,
                    "timeout_ms": DEADLINE_S * 1000,
                    "user": str(number),
                    "supersede": "file",
                }
                began_s = time.monotonic()
                try:
                    async with session.post(f"{url}/v1/completions", json=body) as response:
                        content = await response.read()
                        failed = response.status != 200 or b'"error"' in content
                        ends[f"{response.status} {content[-200:]!r}" if failed else "200"] += 1
                except TimeoutError:
                    ends["hung"] += 1
                except aiohttp.ClientError as error:
                    ends[repr(error)] += 1
                took_s.append(time.monotonic() - began_s)

        tasks = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        try:
            yield ends, took_s
        finally:
            is_over = True
            await asyncio.gather(*tasks)


async def metrics(url: str) -> dict[str, float]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.1)


def answered(ends: Counter[str], more: int) -> Callable[[], Awaitable[bool]]:
    """Wait for this many more answers."""
    wanted = ends["200"] + more

    async def enough() -> bool:
        return ends["200"] >= wanted

    return enough


def check(ends: Counter[str], took_s: list[float]) -> None:
    assert set(ends) == {"200"}, ends
    assert max(took_s) < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_no_request_fails_when_an_engine_dies_or_hangs_under_load(served_model: Path, number: int) -> None:
    async def main(engines: list[Process], gateway: Process) -> None:
        async with crowd(gateway.url) as (ends, took_s):
            await until(answered(ends, 2 * CLIENTS))
            engines[0].signal(number)

            async def is_noticed() -> bool:
                found = await metrics(gateway.url)
                is_up = found.get('lakh:gateway_replicas{state="up"}') == 1
                return is_up and found["lakh:gateway_failovers_total"] > 0

            await until(is_noticed)
            await until(answered(ends, 2 * CLIENTS))
            if number == signal.SIGSTOP:  # it comes back, and is used again
                engines[0].signal(signal.SIGCONT)

                async def is_back() -> bool:
                    return (await metrics(gateway.url)).get('lakh:gateway_replicas{state="up"}') == 2

                await until(is_back)
                await until(answered(ends, CLIENTS))
        check(ends, took_s)

    with scene(served_model) as (engines, gateway):
        asyncio.run(main(engines, gateway))


def test_no_request_fails_when_an_engine_is_terminated(served_model: Path) -> None:
    async def main(engines: list[Process], gateway: Process) -> None:
        async with crowd(gateway.url) as (ends, took_s):
            await until(answered(ends, CLIENTS))
            engines[0].signal(signal.SIGTERM)
            await asyncio.to_thread(engines[0].process.wait, 60)
            assert engines[0].process.returncode == 0
            await until(answered(ends, 2 * CLIENTS))
        check(ends, took_s)

    with scene(served_model) as (engines, gateway):
        asyncio.run(main(engines, gateway))


def test_no_request_fails_when_redis_is_killed_and_restarted_under_load(served_model: Path, redis_server: Any) -> None:

    async def main(gateway: Process) -> None:
        async def is_up() -> bool:
            return (await metrics(gateway.url))["lakh:store_up"] == 1

        async with crowd(gateway.url) as (ends, took_s):
            await until(answered(ends, CLIENTS))
            redis_server.kill()
            await until(answered(ends, 2 * CLIENTS))
            found = await metrics(gateway.url)
            assert found["lakh:store_up"] == 0
            assert found["lakh:store_failures_total"] > 0
            redis_server.start()
            await until(is_up)
            await until(answered(ends, 2 * CLIENTS))
        check(ends, took_s)

    with scene(served_model, "--cache", redis_server.url) as (_, gateway):
        asyncio.run(main(gateway))
