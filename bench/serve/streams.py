"""Many streaming clients that disconnect at random: nothing leaks, and every text is its prompt's greedy text alone.

    python -m bench.serve.streams MODEL [--clients 300] [--seconds 600] [--disconnect 0.3] [--threads N] [--json]

Starts `lakh serve MODEL` without a completion cache and asks for the greedy text of every prompt, one at a time. Then
all clients stream prompts of that set, back to back, and a share of them disconnects after a random number of events. A
whole text must be equal to the prompt's, a broken-off one its beginning. At the end no KV-cache block is held, and
neither process has more descriptors than before or more memory than after a tenth of the time (but for noise). Exits
with 65 if any of this fails. Prompts are pieces of the standard library's source.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from lakh.server.loadgen.target import read_metrics

PROMPTS, PROMPT_CHARS, MAX_TOKENS = 64, 160, 24
REQUEST_S = 600.0  # for one request in a queue of all clients
READY_S = 600.0
SETTLE_S = 30.0  # for connections to close and blocks to be freed
SAMPLE_S = 1.0
BUSY_S = 0.2  # before a client that got a 429 asks again
NOISE_BYTES = 64 << 20  # of an allocator
NOISE_FILES = 8


class Streams:
    def __init__(self, url: str, pids: dict[str, int], disconnect: float, seed: int) -> None:
        self._url, self._pids, self._disconnect = f"{url}/v1/completions", pids, disconnect
        self._server = url
        self._random = random.Random(seed)
        self.expected: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.examples: list[dict[str, str]] = []
        self.samples: list[dict[str, float]] = []

    async def run(self, clients: int, seconds: float) -> dict[str, Any]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            for prompt in _prompts():
                text, is_whole = await self._stream(session, prompt, None)
                assert is_whole, "an undisturbed request broke off"
                self.expected[prompt] = text
            before = await self._sample(session)
            stop_s = time.monotonic() + seconds
            sampling = asyncio.create_task(self._watch(session, stop_s))
            await asyncio.gather(*[self._client(session, stop_s) for _ in range(clients)])
            await sampling
            after = await self._settle(session, before)
        early = self.samples[len(self.samples) // 10] if self.samples else before
        return self._result(before, early, after, clients, seconds)

    def _result(
        self, before: dict[str, float], early: dict[str, float], after: dict[str, float], clients: int, seconds: float
    ) -> dict[str, Any]:
        problems = {"wrong_texts": self.counts["wrong"], "failed": self.counts["failed"]}
        problems["blocks_held"] = int(after["blocks"])
        for name in self._pids:
            problems[f"{name}_files"] = max(int(after[f"{name}_files"] - before[f"{name}_files"]) - NOISE_FILES, 0)
            grown = after[f"{name}_bytes"] - early[f"{name}_bytes"]
            problems[f"{name}_bytes"] = int(grown) if grown > NOISE_BYTES else 0
        return {
            "clients": clients,
            "seconds": seconds,
            **{kind: self.counts[kind] for kind in ("whole", "broken_off", "busy", "wrong", "failed")},
            "most_blocks": max((sample["blocks"] for sample in self.samples), default=0.0),
            "most_running": max((sample["running"] for sample in self.samples), default=0.0),
            "preemptions": after["preemptions"] - before["preemptions"],
            "before": before,
            "early": early,
            "after": after,
            "wrong_examples": self.examples,
            "problems": {name: value for name, value in problems.items() if value},
        }

    async def _client(self, session: aiohttp.ClientSession, stop_s: float) -> None:
        while time.monotonic() < stop_s:
            prompt = self._random.choice(list(self.expected))
            cut = self._random.randint(0, MAX_TOKENS) if self._random.random() < self._disconnect else None
            try:
                text, is_whole = await self._stream(session, prompt, cut)
            except _Busy:
                self.counts["busy"] += 1
                await asyncio.sleep(BUSY_S)
                continue
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
                self.counts["failed"] += 1
                if len(self.examples) < 10:
                    self.examples.append({"prompt": prompt, "error": f"{type(error).__name__}: {error}"[:200]})
                continue
            wanted = self.expected[prompt]
            is_right = text == wanted if is_whole else wanted.startswith(text)
            self.counts["whole" if is_whole else "broken_off"] += 1
            if not is_right:
                self.counts["wrong"] += 1
                if len(self.examples) < 10:
                    self.examples.append({"prompt": prompt, "found": text, "expected": wanted})

    async def _stream(self, session: aiohttp.ClientSession, prompt: str, cut: int | None) -> tuple[str, bool]:
        """The text, and whether it ended by itself; disconnects after `cut` events."""
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        text, events = "", 0
        async with session.post(self._url, json=body) as response:
            if response.status == 429:
                raise _Busy
            response.raise_for_status()
            async for line in response.content:
                if events == cut:
                    return text, False
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return text, True
                (choice,) = json.loads(data)["choices"]
                text += choice["text"]
                events += 1
        raise ValueError("the stream broke off")

    async def _watch(self, session: aiohttp.ClientSession, stop_s: float) -> None:
        while time.monotonic() < stop_s:
            self.samples.append(await self._sample(session))
            await asyncio.sleep(SAMPLE_S)

    async def _settle(self, session: aiohttp.ClientSession, before: dict[str, float]) -> dict[str, float]:
        limit_s = time.monotonic() + SETTLE_S
        while True:
            found = await self._sample(session)
            names = [f"{name}_files" for name in self._pids]
            is_settled = not found["blocks"] and all(found[name] <= before[name] + NOISE_FILES for name in names)
            if is_settled or time.monotonic() > limit_s:
                return found
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self, session: aiohttp.ClientSession) -> dict[str, float]:
        metrics = await read_metrics(session, self._server)
        found = {
            "blocks": metrics.get("lakh:kv_cache_blocks_held", 0.0),
            "running": metrics.get("lakh:num_requests_running", 0.0),
            "preemptions": metrics.get("lakh:num_preemptions_total", 0.0),
        }
        for name, pid in self._pids.items():
            found[f"{name}_files"] = float(len(list(Path(f"/proc/{pid}/fd").iterdir())))
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[f"{name}_bytes"] = float(pages * 4096)
        return found


class _Busy(Exception):
    """A 429: the waiting queue is full."""


def _prompts() -> list[str]:
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    step = (len(text) - PROMPT_CHARS) // PROMPTS
    return [text[start : start + PROMPT_CHARS] for start in range(0, step * PROMPTS, step)]


@contextmanager
def served(model: str, *options: str) -> Iterator[dict[str, Any]]:
    """A server of this machine: what `lakh serve --json` prints."""
    command = [sys.executable, "-m", "lakh", "serve", model, "--http", "127.0.0.1:0", "--cache", "off", "--json"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        yield json.loads(line)
    finally:
        process.terminate()
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()


async def measure(url: str, server_pid: int, clients: int, seconds: float, disconnect: float, seed: int) -> Any:
    async with aiohttp.ClientSession() as session:
        engine_pid = int((await read_metrics(session, url))["lakh:engine_process_id"])
    return await Streams(url, {"server": server_pid, "engine": engine_pid}, disconnect, seed).run(clients, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--disconnect", type=float, default=0.3, help="share of requests")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    more = ["--max-waiting", str(2 * options.clients)]
    more += [] if options.threads is None else ["--threads", str(options.threads)]
    with served(options.model, *more) as server:
        arguments = (options.clients, options.seconds, options.disconnect, options.seed)
        found = asyncio.run(measure(server["url"], server["pid"], *arguments))
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    sys.exit(65 if found["problems"] else 0)


if __name__ == "__main__":
    main()
