"""The engine in a child process behaves like one in this process, and its death is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lakh.errors import UserError
from lakh.server.backend import CompletionDelta, Usage
from lakh.server.backends import engine_process, response_queue
from lakh.server.backends.engine_process import EngineProcessBackend
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.request import RequestError, parse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def request(**fields: Any) -> Any:
    return parse({"prompt": "def add(", "max_tokens": 12, "temperature": 0, **fields}, "")


async def ask(backend: Any, **fields: Any) -> tuple[str, Usage]:
    items = [item async for item in backend.complete(request(**fields))]
    assert isinstance(items[-1], Usage)
    return "".join(item.text for item in items if isinstance(item, CompletionDelta)), items[-1]


async def until(true: Any, limit_s: float = 90.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.02)


def figure(backend: Any, name: str) -> float:
    return next(
        sample.value
        for family in backend.metric_families()
        for sample in family.samples
        if sample.name == f"lakh:{name}"
    )


def test_the_engine_process_completes_rejects_cancels_and_reports_its_death(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_queue, "LATE_S", 0.2)
    deaths: list[str] = []
    load = {"path": str(model_dir), "threads": 1}
    backend = EngineProcessBackend(load, max_waiting=4, on_death=lambda: deaths.append("died"), max_restarts=0)
    local = InProcessBackend(Engine.load(str(model_dir)), max_waiting=4)

    async def scenario() -> None:
        await backend.start()
        assert backend.models() == local.models()
        both = [await ask(one) for one in (backend, local)]
        assert both[0] == both[1]
        together = await asyncio.gather(*[ask(backend, prompt=f"def x{i % 3}(") for i in range(4)])
        assert together[0][0] == together[3][0]
        with pytest.raises(RequestError) as refused:
            await ask(backend, max_tokens=5000)
        assert (refused.value.status, refused.value.param) == (400, "max_tokens")
        pieces = backend.complete(request(max_tokens=80))
        await anext(pieces)
        await pieces.aclose()  # the reader stops
        await until(lambda: figure(backend, "kv_cache_blocks_held") == 0 and backend.num_running == 0)
        assert figure(backend, "prefix_cache_queries_total") > 0
        os.kill(backend.pid, signal.SIGSTOP)  # it sends nothing more before it dies
        with pytest.raises(RequestError) as late:
            await ask(backend, timeout_ms=1)
        assert (late.value.status, late.value.code) == (503, "timeout")
        waiting = asyncio.create_task(ask(backend, max_tokens=80, n=16))
        await until(lambda: backend._responses)
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(RequestError) as gone:
            await waiting
        assert gone.value.status == 503
        await until(lambda: deaths == ["died"])
        assert backend.models() == []
        assert "SIGKILL" in str(backend.died)
        with pytest.raises(RequestError):
            await ask(backend)
        await backend.close()
        await local.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stopped_engine_is_not_ready_and_a_dead_one_is_restarted(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "SILENT_S", 1.0)
    backend = EngineProcessBackend({"path": str(model_dir), "threads": 1}, max_waiting=4)

    async def scenario() -> None:
        await backend.start()
        before = await ask(backend)
        first = backend.pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: backend.models() == [])
        assert "silent" in str(backend.health().problem)
        assert backend.health().is_alive
        os.kill(first, signal.SIGCONT)
        await until(lambda: backend.health().problem is None)
        assert (await ask(backend))[0] == before[0]
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr(engine_process, "DEAD_S", 2.0)  # and never continued: it is killed
        await until(lambda: "SIGKILL" in str(backend.health().problem))
        with pytest.raises(RequestError) as refused:
            await ask(backend)
        assert (refused.value.status, refused.value.code) == (503, "engine_gone")
        await until(lambda: backend.health().problem is None)
        assert backend.pid != first
        assert (await ask(backend))[0] == before[0]
        assert figure(backend, "engine_restarts_total") == 1
        await backend.close()
        assert backend.died is None

    asyncio.run(scenario())


def test_drain_ends_long_requests_with_the_text_they_have(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "CLOSE_S", 60.0)  # a busy machine is slow to end a process
    backend = EngineProcessBackend({"path": str(model_dir), "threads": 1}, max_waiting=4)

    async def scenario() -> None:
        await backend.start()
        waiting = asyncio.create_task(ask(backend, max_tokens=80, n=8))
        await until(lambda: backend._responses)
        await backend.drain(0.0)
        with contextlib.suppress(RequestError):  # a 503 without any text
            assert (await waiting)[1].completion_tokens <= 640
        await backend.close()
        assert backend.died is None
        assert backend._child.exit_code == 0

    asyncio.run(scenario())


def test_a_load_error_of_the_child_is_raised_in_the_parent(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        EngineProcessBackend({"path": str(tmp_path / "nothing")}, max_waiting=4)


def test_the_engine_process_ends_with_a_parent_that_dies_while_the_model_loads(model_dir: Path) -> None:
    code = (
        "import os, sys; from lakh.child_process import ChildProcess; from lakh.server.backends import engine_process;"
        "child = ChildProcess.start(engine_process.MAIN, {'path': sys.argv[1]}, 1);"
        "print(child.pid, flush=True); os._exit(0)"
    )
    parent = subprocess.run([sys.executable, "-c", code, str(model_dir)], stdout=subprocess.PIPE, text=True, check=True)
    pid = int(parent.stdout)
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
