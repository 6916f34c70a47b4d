"""A server process under a crowd: bounded, fair in its answers, and empty-handed afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh.spec.model import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS
from lakh.workloads.code import hf
from lakh.workloads.code.model import CodeModel, init_weights

CLIENTS = 500
SECONDS = 12.0
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    spec = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=512, context=512)
    model = CodeModel(spec)
    init_weights(model, 1)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.save(str(folder / "tokenizer.json"))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    hf.save(folder / "model", spec, weights, folder / "tokenizer.json")
    return folder / "model"


@pytest.fixture
def server(model_dir: Path) -> Iterator[tuple[str, int]]:
    command = [
        sys.executable,
        "-m",
        "lakh",
        "serve",
        str(model_dir),
        "--http",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield ready["url"], process.pid
        process.send_signal(signal.SIGTERM)
        _, talk = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, talk
        assert "Traceback" not in talk, talk
    finally:
        process.kill()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def crowd(url: str, pid: int) -> tuple[Counter[str], list[float], int, int, dict[str, float]]:
    ends: Counter[str] = Counter()
    took_s: list[float] = []
    text = Path(__file__).read_text()
    until_s = time.monotonic() + SECONDS
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < until_s:
                start = rng.randrange(len(text) - 400)
                body = {
                    "prompt": text[start : start + 300],
                    "max_tokens": 4,
                    "temperature": 0,
                    "stream": rng.random() < 0.5,
                    "user": str(number),
                }
                began_s = time.monotonic()
                patience_s = 0.3 if rng.random() < 0.2 else DEADLINE_S  # one in five goes away
                try:
                    async with (
                        asyncio.timeout(patience_s),
                        session.post(f"{url}/v1/completions", json=body) as response,
                    ):
                        await response.read()
                        ends[str(response.status)] += 1
                        if response.status == 200:
                            took_s.append(time.monotonic() - began_s)
                except TimeoutError:
                    ends["went away" if patience_s < DEADLINE_S else "hung"] += 1
                await asyncio.sleep(rng.random())

        early = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        await asyncio.sleep(SECONDS / 2)
        assert asyncio.get_running_loop().time() > early
        middle_bytes = resident_bytes(pid)
        await asyncio.gather(*tasks)
        async with asyncio.timeout(DEADLINE_S):
            while (after := await metrics(session, url))["lakh:num_requests_running"] or after[
                "lakh:num_requests_waiting"
            ]:
                await asyncio.sleep(0.1)
    return ends, took_s, middle_bytes, resident_bytes(pid), after


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_five_hundred_clients_get_answers_or_a_429_and_leave_nothing_behind(server: tuple[str, int]) -> None:
    url, pid = server
    ends, took_s, middle_bytes, end_bytes, after = asyncio.run(crowd(url, pid))
    assert set(ends) <= {"200", "429", "went away"}, ends
    assert ends["200"] > 50
    assert ends["429"] > 0  # the queue has a bound, and 500 clients find it
    assert max(took_s) < DEADLINE_S
    assert after["lakh:kv_cache_blocks_held"] == 0
    assert after["lakh:requests_cancelled_total"] > 0
    # Half-way everything is at work already: what grows after that would grow for ever. 64 MiB is allocator noise.
    assert end_bytes - middle_bytes < 64 << 20
