"""The load generator: many typing users against a completion service.

Open loop (`rate`): requests leave at Poisson times whether or not earlier ones were answered, as keystrokes do; typing
again cancels the user's previous request, as an editor does. Closed loop (`clients`): each client waits for its
response, pauses and asks again; one request in five is cancelled early.

`Techniques` select which server features can work by what is sent: a fresh cache_salt per request defeats the prefix
cache, a missing `supersede` key keeps older requests running, and so on. So one server can be measured with each
feature on and off.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lakh.errors import LakhError
from lakh.server.gc_control import full_collections_disabled
from lakh.server.loadgen.report import GaugeSample, LoadReport, both_processes
from lakh.server.loadgen.target import RequestOutcome, Target, read_metrics, target_of
from lakh.server.loadgen.typing import EditorRequest, arrivals_s, read_source_files, typing_requests
from lakh.server.prompts.fim import cut_before

__all__ = ["LoadConfig", "Techniques", "request_body", "run_load"]

QUANTUM_CHARS = 1024  # the prompt's start moves in such steps, or a quarter of the prompt
SAMPLE_EVERY_S = 1.0
THINK_S = 1.0  # mean time between a response and the client's next request
CANCELLED_SHARE, CANCEL_AFTER_S = 0.2, 0.3  # of the clients' requests
IDLE_TIMEOUT_S = 30.0  # for the server to become idle afterwards
IDLE_TIMEOUT_INTERRUPTED_S = 2.0
METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Techniques:
    prefix_cache: bool = True
    supersede: bool = True
    """Cancel older requests of the same file: the client disconnects and sends a supersede key."""
    reuse: bool = True
    """Accept the rest of a suggestion whose beginning was typed."""


@dataclass(frozen=True)
class LoadConfig:
    rate: float
    seconds: float
    clients: int | None = None
    """Closed loop with this many clients; the rate then follows from the responses."""
    users: int = 50
    burst: float = 1.0
    order: str = "spm"
    """psm, spm, or none: the prefix only, for models without fill in the middle."""
    max_tokens: int = 32
    timeout_s: float = 2.0
    prefix_chars: int = 6_000
    """At most this many characters before the cursor; cut in steps, so that the prefix cache stays useful."""
    suffix_chars: int = 2_000
    stop_rule: str | None = None
    seed: int = 0
    key: str | None = None
    techniques: Techniques = field(default_factory=Techniques)


def run_load(
    url: str,
    files: Path,
    load: LoadConfig,
    *,
    metrics_url: str | None = None,
    progress: Callable[[int], None] = lambda sent: None,
) -> LoadReport:
    """`metrics_url`: the HTTP address, if `url` is a gRPC one. After Ctrl-C the report holds what was measured."""
    run = _LoadRun(url, read_source_files(files), load, metrics_url, progress)
    with full_collections_disabled():  # our own pauses would count as the server's
        return asyncio.run(run.run())


class _LoadRun:
    def __init__(
        self,
        url: str,
        files: Sequence[tuple[str, str]],
        load: LoadConfig,
        metrics_url: str | None,
        progress: Callable[[int], None],
    ) -> None:
        self.url, self.load, self.progress = url, load, progress
        self.metrics_url = metrics_url or (None if url.startswith("grpc://") else url)
        self.rng = random.Random(load.seed)
        count = load.clients or load.users
        self.users = [typing_requests(user, files, random.Random(self.rng.random())) for user in range(count)]
        self.report = LoadReport()
        self.began_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> LoadReport:
        target = target_of(self.url, self.load.timeout_s, self.load.key)
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                self.report.before = await self._metrics(session)
                self.began_s = time.monotonic()
                sampling = asyncio.create_task(self._sample(session))
                try:
                    await (self._closed_loop(target) if self.load.clients else self._open_loop(target))
                except asyncio.CancelledError:
                    self._interrupted()
                finally:
                    self.report.wall_s = time.monotonic() - self.began_s
                    for task in (sampling, *self._tasks):
                        task.cancel()
                    await asyncio.gather(sampling, *self._tasks, return_exceptions=True)
                try:
                    await self._wait_until_idle(session)
                except (asyncio.CancelledError, LakhError):
                    if not self.report.is_interrupted:
                        raise
        finally:
            await target.close()
        return self.report

    def _interrupted(self) -> None:
        """Ctrl-C ends the run with a report; a second one ends it at once."""
        self.report.is_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()

    async def _open_loop(self, target: Target) -> None:
        load = self.load
        running: dict[int, asyncio.Task[None]] = {}
        for at_s in arrivals_s(load.rate, load.seconds, self.rng, load.burst):
            await asyncio.sleep(max(self.began_s + at_s - time.monotonic(), 0))
            user = self.rng.randrange(load.users)
            older = running.get(user)
            if older is not None and load.techniques.supersede:
                older.cancel()
            running[user] = asyncio.create_task(self._send(target, next(self.users[user])))
            self._tasks.append(running[user])
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _closed_loop(self, target: Target) -> None:
        async def client(number: int) -> None:
            rng = random.Random(f"{self.load.seed}:{number}")
            await asyncio.sleep(rng.random() * THINK_S)
            while time.monotonic() - self.began_s < self.load.seconds:
                cancel_s = CANCEL_AFTER_S if rng.random() < CANCELLED_SHARE else None
                try:
                    async with asyncio.timeout(cancel_s):
                        await self._send(target, next(self.users[number]))
                except TimeoutError:
                    pass  # counted as cancelled
                await asyncio.sleep(rng.expovariate(1 / THINK_S))

        await asyncio.gather(*[client(number) for number in range(len(self.users))])

    async def _send(self, target: Target, request: EditorRequest) -> None:
        report = self.report
        report.sent += 1
        self.progress(report.sent)
        at_s = time.monotonic() - self.began_s
        try:
            outcome: RequestOutcome = await target.complete(request_body(request, self.load))
        except asyncio.CancelledError:
            report.ends["cancelled"] += 1
            raise
        report.ends[outcome.end] += 1
        if outcome.end == "failed":
            report.failures[outcome.detail] += 1
        if outcome.e2e_s:
            report.latencies.append((at_s, outcome.ttft_s, outcome.e2e_s))
            report.characters += outcome.characters

    async def _metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        return {} if self.metrics_url is None else await read_metrics(session, self.metrics_url)

    async def _sample(self, session: aiohttp.ClientSession) -> None:
        while self.metrics_url is not None:
            page = self.report.after = await self._metrics(session)
            self.report.samples.append(_sample(page, time.monotonic() - self.began_s))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _wait_until_idle(self, session: aiohttp.ClientSession) -> None:
        """Only an idle server shows whether blocks leak."""
        until_s = time.monotonic() + (IDLE_TIMEOUT_INTERRUPTED_S if self.report.is_interrupted else IDLE_TIMEOUT_S)
        while self.metrics_url is not None:
            self.report.after = await self._metrics(session)
            sample = _sample(self.report.after, time.monotonic() - self.began_s)
            if not (sample.running or sample.waiting or sample.blocks_held) or time.monotonic() > until_s:
                self.report.samples.append(sample)
                return
            await asyncio.sleep(0.2)


def request_body(request: EditorRequest, load: LoadConfig) -> dict[str, Any]:
    techniques = load.techniques
    body: dict[str, Any] = {
        "prompt": cut_before(request.prefix, load.prefix_chars, min(QUANTUM_CHARS, load.prefix_chars // 4)),
        "max_tokens": load.max_tokens,
        "temperature": 0.0,
        "user": str(request.user),
        "reuse": techniques.reuse,
    }
    if techniques.supersede:
        body["supersede"] = request.file
    if not techniques.prefix_cache:
        body["cache_salt"] = uuid.uuid4().hex
    if load.order != "none":
        body |= {"suffix": request.suffix[: load.suffix_chars], "order": load.order}
    if load.stop_rule:
        body["stop_rule"] = load.stop_rule
    return body


def _sample(page: dict[str, float], at_s: float) -> GaugeSample:
    memory = both_processes(page, "resident_memory_bytes")
    names = ("kv_cache_blocks_held", "num_requests_running", "num_requests_waiting")
    return GaugeSample(at_s, memory, *(page.get(f"lakh:{name}", 0.0) for name in names))
