"""The cost of a request besides the model: `lakh serve` with a tiny model, under an even load.

    python -m bench.serve.overhead [--rate 100] [--seconds 10] [--users 20] [--parts]

A model of one narrow layer completes prompts of about 1,500 tokens (the standard library's source with a few more
characters each time, so that most of a prompt is cached) with 32 streamed tokens. Prints latency percentiles of a cheap
client on the same machine, and the CPU milliseconds per request of the API process and of the engine process, which
other load on the machine hardly disturbs. With --parts, also the single parts in microseconds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh.spec.model import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS
from lakh.workloads.code.formats import hf

SOURCES = [argparse, asyncio.base_events, contextlib, json.decoder, subprocess, tempfile, random]
PROMPT_CHARS, NEW, TYPED = 5300, 32, 3


def sources() -> list[str]:
    return [Path(str(module.__file__)).read_text(encoding="utf-8") for module in SOURCES]


def tiny_model(folder: Path) -> Path:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(sources(), trainer)
    made.save(str(folder / "tokenizer.json"))
    spec = Model(layers=1, width=16, heads=1, kv_heads=1, ffn=16, vocab=4096, context=2048)
    torch.manual_seed(1)
    weights = {
        name: torch.randn(size) * 0.3 if len(size) > 1 else torch.ones(size) for name, size in hf.shapes(spec).items()
    }
    hf.save(folder / "model", spec, weights, folder / "tokenizer.json")
    return folder / "model"


class User:
    """Types in one file; at its end opens another."""

    def __init__(self, number: int, texts: list[str]) -> None:
        self._random, self._texts = random.Random(number), texts
        self._open()

    def _open(self) -> None:
        self._text = self._random.choice([text for text in self._texts if len(text) > 2 * PROMPT_CHARS])
        self._at = self._random.randrange(PROMPT_CHARS, len(self._text) - 200)

    def prompt(self) -> str:
        self._at += self._random.randint(1, 2 * TYPED)
        if self._at > len(self._text):
            self._open()
        start = (self._at - PROMPT_CHARS) // 1024 * 1024  # moves rarely, like an editor that cuts in steps
        return self._text[max(start, 0) : self._at]


async def ask(links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]], where: tuple[str, int], prompt: str):
    """(milliseconds to the first chunk, to the end, events)."""
    began_s = time.perf_counter()
    reader, writer = links.pop() if links else await asyncio.open_connection(*where)
    fields = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "stream": True, "reuse": False}
    body = json.dumps(fields).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    first_s, got = 0.0, b""
    while not got.endswith(b"0\r\n\r\n"):
        piece = await reader.read(65536)
        if not piece or not (got or piece.startswith(b"HTTP/1.1 200")):
            raise ConnectionError(piece[:300])
        if not first_s and b"data:" in piece:
            first_s = time.perf_counter()
        got += piece
    links.append((reader, writer))
    return (first_s - began_s) * 1e3, (time.perf_counter() - began_s) * 1e3, got.count(b"data:") - 1


async def load(url: str, rate: float, seconds: float, num_users: int) -> tuple[list[tuple[float, float, int]], int]:
    where = (urlsplit(url).hostname or "", urlsplit(url).port or 80)
    links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    texts, numbers = sources(), random.Random(7)
    users = [User(number, texts) for number in range(num_users)]
    tasks, at_s, began_s = [], 0.0, time.perf_counter()
    while at_s < seconds:  # open loop: requests do not wait for responses
        await asyncio.sleep(max(began_s + at_s - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(ask(links, where, numbers.choice(users).prompt())))
        at_s += numbers.expovariate(rate)
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    good = [one for one in done if not isinstance(one, BaseException)]
    return good, len(done) - len(good)


def figures(url: str) -> dict[str, float]:
    lines = urlopen(f"{url}/metrics", timeout=5).read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def percentiles(values: list[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {f"p{q}": round(ranked[min(len(ranked) * q // 100, len(ranked) - 1)], 2) for q in (50, 95, 99)}


def measure(url: str, options: argparse.Namespace) -> dict[str, object]:
    asyncio.run(load(url, options.rate / 2, 2.0, options.users))  # compiles, connects, fills the cache
    time.sleep(0.3)
    before, own_s = figures(url), time.process_time()
    done, failed = asyncio.run(load(url, options.rate, options.seconds, options.users))
    time.sleep(0.3)  # the engine's figures are at most 0.1 s old
    after = figures(url)

    def each_ms(name: str) -> float:
        return round((after[name] - before[name]) / len(done) * 1e3, 2)

    return {
        "rate": options.rate,
        "completed": len(done),
        "failed": failed,
        "ttft_ms": percentiles([first for first, _, _ in done]),
        "e2e_ms": percentiles([end for _, end, _ in done]),
        "face_cpu_ms": each_ms("process_cpu_seconds_total"),
        "engine_cpu_ms": each_ms("lakh:engine_cpu_seconds_total"),
        "client_cpu_ms": round((time.process_time() - own_s) / len(done) * 1e3, 2),
        "events_each": round(sum(events for _, _, events in done) / len(done), 1),
        "prompt_tokens": round((after["lakh:prompt_tokens_total"] - before["lakh:prompt_tokens_total"]) / len(done), 1),
        "computed_tokens": round(
            (
                after["lakh:prefix_cache_queries_total"]
                - before["lakh:prefix_cache_queries_total"]
                - after["lakh:prefix_cache_hits_total"]
                + before["lakh:prefix_cache_hits_total"]
            )
            / len(done),
            1,
        ),
    }


def parts(folder: Path) -> dict[str, float]:
    """CPU microseconds of the parts of a request: the minimum of several runs."""
    import pickle

    from lakh.server.backend import CompletionDelta
    from lakh.server.engine import Engine, SamplingParams
    from lakh.server.request import parse

    engine = Engine.load(str(folder))
    prompt = User(1, sources()).prompt()
    body = json.dumps({"prompt": prompt, "max_tokens": NEW, "temperature": 0, "stream": True})
    request = parse(json.loads(body), "")
    ids = engine.prompts.encode(prompt)
    piece = CompletionDelta(0, " return", None, (300,))
    engine.generate([ids], SamplingParams(max_tokens=NEW))

    def least_us(action: object, times: int = 30) -> float:
        took = []
        for _ in range(times):
            began_s = time.thread_time()
            action()  # type: ignore[operator]
            took.append(time.thread_time() - began_s)
        return round(min(took) * 1e6, 1)

    def admitted() -> None:
        row = engine.make_sequence(ids, SamplingParams(max_tokens=NEW))
        engine.submit(row)
        engine.step()
        engine.abort(row)

    return {
        "read JSON and check": least_us(lambda: parse(json.loads(body), "")),
        "tokenize": least_us(lambda: engine.prompts.encode(prompt)),
        "request through pickle": least_us(lambda: pickle.loads(pickle.dumps(request, 5))),
        "16 pieces through pickle": least_us(lambda: pickle.loads(pickle.dumps([(n, piece) for n in range(16)], 5))),
        "admit, one step, leave": least_us(admitted),
        "32 tokens by the engine alone": least_us(lambda: engine.generate([ids], SamplingParams(max_tokens=NEW)), 10),
        "32 tokens to text": least_us(lambda: _detokenize(engine, ids[-NEW:])),
    }


def _detokenize(engine: object, ids: tuple[int, ...]) -> None:
    from lakh.server.detokenizer import DetokenizerStream

    stream = DetokenizerStream(engine._detokenizer)  # type: ignore[attr-defined]
    for token in ids:
        stream.append(token)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--serve", default="", help="more options for lakh serve, in one word")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        command = [sys.executable, "-m", "lakh", "serve", str(model), "--http", ":0", "--threads", "1", "--json"]
        command += ["--cache", "off", "--max-waiting", "1000", *options.serve.split()]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                print(json.dumps(measure(url, options)), flush=True)
            finally:
                server.terminate()
        if options.parts:
            torch.set_num_threads(1)
            print(json.dumps(parts(model)))


if __name__ == "__main__":
    main()
