"""A server process under load: bounded memory, an answer or a 429 for every client, nothing left over."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.serve import streams

import lakh
from lakh.server.loadgen.generator import LoadConfig, run_load

CLIENTS = 500
SECONDS = 12.0
DEADLINE_S = 60.0


@pytest.fixture
def url(served_model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "lakh", "serve", str(served_model), "--http", "127.0.0.1:0", "--json"]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        _, talk = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, talk
        assert "Traceback" not in talk, talk
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_streams_that_break_off_leak_nothing_and_change_no_text(served_model: Path) -> None:
    with streams.served(str(served_model), "--threads", "1", "--cache-tokens", "2048") as server:
        found = asyncio.run(streams.measure(server["url"], server["pid"], 60, 6.0, 0.4, seed=1))
    assert found["problems"] == {}, found
    assert found["whole"] > 50
    assert found["broken_off"] > 10
    assert found["most_blocks"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_five_hundred_clients_get_an_answer_or_a_429_and_nothing_leaks(url: str) -> None:
    load = LoadConfig(
        rate=1,
        clients=CLIENTS,
        seconds=SECONDS,
        max_tokens=4,
        timeout_s=DEADLINE_S,
        prefix_chars=300,
        suffix_chars=60,
    )
    report = run_load(url, Path(lakh.__file__).parent, load)
    found = report.as_dict(price_per_hour=1.0)
    assert found["timeouts"] == 0
    assert found["failed"] == 0, found["failures"]
    assert found["completed"] > 50
    assert found["rejected"] > 0  # the queue has a bound, and 500 clients find it
    assert found["cancelled"] > 0  # one in five goes away
    assert max(e2e_s for _, _, e2e_s in report.latencies) < DEADLINE_S
    assert found["blocks_held_most"] > 0
    assert found["blocks_held_after"] == 0
    # After a third of the requests everything is allocated; later growth would be a leak. 64 MiB is allocator noise.
    assert found["memory_bytes_after"] - found["memory_bytes_early"] < 64 << 20
