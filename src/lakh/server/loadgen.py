"""Load: many typists against a completion service, open loop, over HTTP.

Requests leave at Poisson times whether or not earlier ones were answered, as keystrokes do. A typist who types on
while a request is under way cancels it (the connection closes), as an editor does. What is measured is the client's:
time to the first piece, time to the last, by a monotonic clock; what the server found in its caches is read from its
/metrics before and after. A request that takes longer than the timeout is a timeout, a 429 is rejected, anything else
that is no answer is failed.

Cost is a price per hour of the machine over the completions it made in that hour at this rate: an assumption times a
figure.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lakh.errors import PeerLost, UserError
from lakh.server.typing_load import Ask, Typist, arrivals_s, read_files

__all__ = ["Load", "Report", "percentiles", "run_load"]

MAX_CONNECTIONS = 2000
GRACE_S = 1.0  # beyond the timeout, for an answer that is on its way
QUANTUM_CHARS = 1024


@dataclass(frozen=True)
class Load:
    rate: float
    seconds: float
    users: int = 50
    order: str = "spm"
    """psm, spm, or none: a plain prefix without the text after the cursor, for models that cannot fill in."""
    max_tokens: int = 32
    timeout_s: float = 2.0
    prefix_chars: int = 6_000
    """What an editor sends before the cursor at most; cut in steps, so that a cache keeps its worth."""
    suffix_chars: int = 2_000
    stop_rule: str | None = None
    price_per_hour: float = 3.0
    seed: int = 0
    key: str | None = None


@dataclass
class Report:
    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """completed, cancelled, timeouts, rejected, failed"""
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    characters: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0

    def as_dict(self, load: Load) -> dict[str, Any]:
        def grew(name: str) -> float:
            return self.after.get(name, 0.0) - self.before.get(name, 0.0)

        completed = self.ends["completed"]
        prompt_tokens, drafts = grew("lakh:prefix_cache_queries_total"), grew("lakh:spec_decode_num_draft_tokens_total")
        found = grew("lakh:prefix_cache_hits_total")
        kept = grew("lakh:spec_decode_num_accepted_tokens_total")
        return {
            "sent": self.sent,
            **{end: self.ends[end] for end in ("completed", "cancelled", "timeouts", "rejected", "failed")},
            "ttft_ms": percentiles(self.ttft_s),
            "e2e_ms": percentiles(self.e2e_s),
            "prefix_hit_rate": found / prompt_tokens if prompt_tokens else None,
            "prompt_tokens_per_request": prompt_tokens / self.sent if self.sent else None,
            "prefilled_tokens_per_request": (prompt_tokens - found) / self.sent if self.sent else None,
            "draft_acceptance": kept / drafts if drafts else None,
            "tok_per_s": grew("lakh:generation_tokens_total") / self.wall_s if self.wall_s else None,
            "completions_per_s": completed / self.wall_s if self.wall_s else None,
            "cost_per_1k": load.price_per_hour / 3600 * self.wall_s / completed * 1000 if completed else None,
            "failures": dict(self.failures),
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds; nothing where there is nothing to say."""
    ranked = sorted(seconds)
    marks = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    return {name: ranked[min(int(q * len(ranked)), len(ranked) - 1)] * 1e3 if ranked else None for name, q in marks}


def run_load(url: str, files: Path, load: Load, progress: Callable[[int], None] = lambda sent: None) -> Report:
    return asyncio.run(_run(url.rstrip("/"), read_files(files), load, progress))


async def _run(url: str, files: Sequence[tuple[str, str]], load: Load, progress: Callable[[int], None]) -> Report:
    rng = random.Random(load.seed)
    typists = [Typist(user, files, random.Random(rng.random())) for user in range(load.users)]
    report = Report()
    under_way: dict[int, asyncio.Task[None]] = {}
    headers = {"Authorization": f"Bearer {load.key}"} if load.key else {}
    timeout = aiohttp.ClientTimeout(total=load.timeout_s + GRACE_S)
    connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        report.before = await _metrics(session, url)
        began_s = time.monotonic()
        tasks = []
        for at_s in arrivals_s(load.rate, load.seconds, rng):
            await asyncio.sleep(max(began_s + at_s - time.monotonic(), 0))
            user = rng.randrange(load.users)
            older = under_way.get(user)
            if older is not None and not older.done():
                older.cancel()
            task = asyncio.create_task(_one(session, url, typists[user].ask(), load, report))
            under_way[user] = task
            tasks.append(task)
            report.sent += 1
            progress(report.sent)
        await asyncio.gather(*tasks, return_exceptions=True)
        report.wall_s = time.monotonic() - began_s
        report.after = await _metrics(session, url)
    return report


async def _one(session: aiohttp.ClientSession, url: str, ask: Ask, load: Load, report: Report) -> None:
    body: dict[str, Any] = {
        "prompt": _end_of(ask.prefix, load.prefix_chars),
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "user": str(ask.user),
        "supersede": ask.file,
    }
    if load.order != "none":
        body |= {"suffix": ask.suffix[: load.suffix_chars], "order": load.order}
    if load.stop_rule:
        body["stop_rule"] = load.stop_rule
    began_s = time.monotonic()
    first_s: float | None = None
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                end = "rejected" if response.status == 429 else "failed"
                if response.status == 409:
                    end = "cancelled"
                report.ends[end] += 1
                if end == "failed":
                    report.failures[f"{response.status} {(await response.text())[:100]}"] += 1
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.monotonic()
                    report.characters += len(json.loads(line[6:])["choices"][0]["text"])
    except asyncio.CancelledError:
        report.ends["cancelled"] += 1
        raise
    except TimeoutError:
        report.ends["timeouts"] += 1
        return
    except (aiohttp.ClientError, ValueError, LookupError) as error:
        report.ends["failed"] += 1
        report.failures[type(error).__name__] += 1
        return
    took_s = time.monotonic() - began_s
    report.ends["timeouts" if took_s > load.timeout_s else "completed"] += 1
    if first_s is not None:
        report.ttft_s.append(first_s - began_s)
    report.e2e_s.append(took_s)


def _end_of(text: str, most: int) -> str:
    """The end of a text, from a place that moves only every QUANTUM_CHARS characters."""
    if len(text) <= most:
        return text
    return text[-(-(len(text) - most) // QUANTUM_CHARS) * QUANTUM_CHARS :]


async def _metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Plain samples of the metrics page; {} where the server has none."""
    try:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except aiohttp.InvalidURL:
        raise UserError(url, "is no address", "write e.g. http://127.0.0.1:8000") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        found = f"does not answer ({type(error).__name__})"
        raise PeerLost(url, found, "start it with: lakh serve MODEL --http HOST:PORT") from None
    samples = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in samples if "{" not in name}
