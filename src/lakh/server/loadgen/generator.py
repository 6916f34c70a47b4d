"""LoadConfig: many typists against a completion service.

Two ways. Open loop (`rate`): requests leave at Poisson times whether or not earlier ones were answered, as keystrokes
do; a typist who types on while a request is under way cancels it, as an editor does. Closed loop (`clients`): so many
clients at once, each waits for its answer, thinks, and asks again; one request in five is given up soon.

What is sent decides which techniques of the server can work (`Techniques`): a fresh cache_salt for every request leaves
it no prefix to find, no `supersede` key leaves older requests at work, and so on. So the same server can be measured
with each of them on and off.
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
from lakh.server.gc_control import quiet
from lakh.server.loadgen.report import LoadReport, GaugeSample, both_processes
from lakh.server.loadgen.target import RequestOutcome, Target, read_metrics, target_of
from lakh.server.loadgen.typing import EditorRequest, TypingUser, arrivals_s, read_source_files

__all__ = ["LoadConfig", "Techniques", "request_body", "run_load"]

QUANTUM_CHARS = 1024
SAMPLE_EVERY_S = 1.0
THINK_S = 1.0  # on average, between an answer and the next request of a client
GIVEN_UP, PATIENCE_S = 0.2, 0.3  # so many requests of clients are given up, after so long
SETTLE_S = 30.0  # for a server to become idle afterwards
SETTLE_INTERRUPTED_S = 2.0
METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Techniques:
    prefix_cache: bool = True
    supersede: bool = True
    """Older requests of the same file are given up: by the client's disconnecting and by the key that it sends."""
    reuse: bool = True
    """The rest of a suggestion will do, where its beginning was typed."""


@dataclass(frozen=True)
class LoadConfig:
    rate: float
    seconds: float
    clients: int | None = None
    """Closed loop with so many clients; the rate then follows from the answers."""
    users: int = 50
    burst: float = 1.0
    order: str = "spm"
    """psm, spm, or none: a plain prefix without the text after the cursor, for models that cannot fill in."""
    max_tokens: int = 32
    timeout_s: float = 2.0
    prefix_chars: int = 6_000
    """What an editor sends before the cursor at most; cut in steps, so that a cache keeps its worth."""
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
    """`metrics_url`: where the HTTP face is, if `url` is not it. Interrupted (Ctrl-C), the report says so and holds
    what was measured until then.
    """
    run = _Run(url, read_source_files(files), load, metrics_url, progress)
    with quiet():  # a pause of ours would be counted as the server's
        return asyncio.run(run.run())


class _Run:
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
        self.typists = [TypingUser(user, files, random.Random(self.rng.random())) for user in range(count)]
        self.report = LoadReport()
        self.began_s = 0.0
        self._asking: list[asyncio.Task[None]] = []

    async def run(self) -> LoadReport:
        target = target_of(self.url, self.load.timeout_s, self.load.key)
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                self.report.before = await self._metrics(session)
                self.began_s = time.monotonic()
                sampling = asyncio.create_task(self._sample(session))
                try:
                    await (self._clients(target) if self.load.clients else self._typists(target))
                except asyncio.CancelledError:
                    self._interrupted()
                finally:
                    self.report.wall_s = time.monotonic() - self.began_s
                    for task in (sampling, *self._asking):
                        task.cancel()
                    await asyncio.gather(sampling, *self._asking, return_exceptions=True)
                try:
                    await self._settle(session)
                except (asyncio.CancelledError, LakhError):
                    if not self.report.is_interrupted:
                        raise
        finally:
            await target.close()
        return self.report

    def _interrupted(self) -> None:
        """Ctrl-C cancels the run: what was measured until then is its report. The next one ends it at once."""
        self.report.is_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()

    # --- open loop ---

    async def _typists(self, target: Target) -> None:
        load = self.load
        under_way: dict[int, asyncio.Task[None]] = {}
        for at_s in arrivals_s(load.rate, load.seconds, self.rng, load.burst):
            await asyncio.sleep(max(self.began_s + at_s - time.monotonic(), 0))
            user = self.rng.randrange(load.users)
            older = under_way.get(user)
            if older is not None and load.techniques.supersede:
                older.cancel()
            under_way[user] = asyncio.create_task(self._one(target, self.typists[user].ask()))
            self._asking.append(under_way[user])
        await asyncio.gather(*self._asking, return_exceptions=True)

    # --- closed loop ---

    async def _clients(self, target: Target) -> None:
        async def client(number: int) -> None:
            rng = random.Random(f"{self.load.seed}:{number}")
            await asyncio.sleep(rng.random() * THINK_S)
            while time.monotonic() - self.began_s < self.load.seconds:
                response_timeout_s = PATIENCE_S if rng.random() < GIVEN_UP else None
                try:
                    async with asyncio.timeout(response_timeout_s):
                        await self._one(target, self.typists[number].ask())
                except TimeoutError:
                    pass  # given up, and counted as cancelled
                await asyncio.sleep(rng.expovariate(1 / THINK_S))

        await asyncio.gather(*[client(number) for number in range(len(self.typists))])

    # --- one request ---

    async def _one(self, target: Target, ask: EditorRequest) -> None:
        report = self.report
        report.sent += 1
        self.progress(report.sent)
        at_s = time.monotonic() - self.began_s
        try:
            outcome: RequestOutcome = await target.ask(request_body(ask, self.load))
        except asyncio.CancelledError:
            report.ends["cancelled"] += 1
            raise
        report.ends[outcome.end] += 1
        if outcome.end == "failed":
            report.failures[outcome.words] += 1
        if outcome.e2e_s:
            report.answers.append((at_s, outcome.ttft_s, outcome.e2e_s))
            report.characters += outcome.characters

    # --- the server's own figures ---

    async def _metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        return {} if self.metrics_url is None else await read_metrics(session, self.metrics_url)

    async def _sample(self, session: aiohttp.ClientSession) -> None:
        while self.metrics_url is not None:
            page = self.report.after = await self._metrics(session)
            self.report.samples.append(_sample(page, time.monotonic() - self.began_s))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _settle(self, session: aiohttp.ClientSession) -> None:
        """Until the server has nothing to do: only then do its blocks tell anything."""
        until_s = time.monotonic() + (SETTLE_INTERRUPTED_S if self.report.is_interrupted else SETTLE_S)
        while self.metrics_url is not None:
            self.report.after = await self._metrics(session)
            sample = _sample(self.report.after, time.monotonic() - self.began_s)
            if not (sample.running or sample.waiting or sample.blocks_held) or time.monotonic() > until_s:
                self.report.samples.append(sample)
                return
            await asyncio.sleep(0.2)


def request_body(ask: EditorRequest, load: LoadConfig) -> dict[str, Any]:
    techniques = load.techniques
    body: dict[str, Any] = {
        "prompt": _end_of(ask.prefix, load.prefix_chars),
        "max_tokens": load.max_tokens,
        "temperature": 0.0,
        "user": str(ask.user),
        "reuse": techniques.reuse,
    }
    if techniques.supersede:
        body["supersede"] = ask.file
    if not techniques.prefix_cache:
        body["cache_salt"] = uuid.uuid4().hex
    if load.order != "none":
        body |= {"suffix": ask.suffix[: load.suffix_chars], "order": load.order}
    if load.stop_rule:
        body["stop_rule"] = load.stop_rule
    return body


def _end_of(text: str, most: int) -> str:
    """The end of a text, from a place that moves only in steps: a quarter of what is sent, at most QUANTUM_CHARS."""
    if len(text) <= most:
        return text
    step = max(min(QUANTUM_CHARS, most // 4), 1)
    return text[-(-(len(text) - most) // step) * step :]


def _sample(page: dict[str, float], at_s: float) -> GaugeSample:
    memory = both_processes(page, "resident_memory_bytes")
    names = ("kv_cache_blocks_held", "num_requests_running", "num_requests_waiting")
    return GaugeSample(at_s, memory, *(page.get(f"lakh:{name}", 0.0) for name in names))
