"""The plan page's answers: names and numbers are checked, and commands run as child processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server import application
from lakh.dashboard.server.planning import PlanService

CHOICES = {"models": ["llama3-8b", "small"], "clusters": ["h100-pod"]}
QUERY = {"model": "small", "cluster": "h100-pod", "gpus": "64", "batch": "8.0", "sequence": "4096", "tokens": "1e12"}
FAKE = """
import json, sys
words = sys.argv[1:]
if words[:2] == ["plan", "goodput"]:
    print(json.dumps({"goodput": 0.9, "words": words}))
elif "llama3-8b" in words:
    print(json.dumps({"error": {"where": "w", "found": "f", "todo": "t"}}))
else:
    best = {"gpus": 64, "name": "dp=64", "step_s": 1.0, "usd_per_step": 2.0, "memory_bytes": 3, "run_days": 5.0}
    best["tp"] = 1
    print("progress")
    print(json.dumps({"best": best, "pareto": [best] * 50, "why": "because", "searched": 7, "words": words}))
"""


@contextlib.asynccontextmanager
async def client(service: PlanService) -> AsyncIterator[Callable[..., Any]]:
    app = web.Application()
    app.router.add_get("/plan.json", service.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:

            async def ask(**query: str) -> tuple[int, Any]:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/plan.json"
                async with session.get(url, params=query) as answer:
                    text = await answer.text()
                    return answer.status, json.loads(text) if answer.status == 200 else text

            yield ask
    finally:
        await runner.cleanup()


def test_commands_get_checked_options_and_the_answer_is_bounded(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)

    async def drive() -> None:
        async with client(PlanService(lambda: CHOICES, [sys.executable, str(fake)])) as ask:
            status, found = await ask(**QUERY)
            assert status == 200
            options = "--model small --cluster h100-pod --gpus 64 --batch 8 --sequence 4096 --tokens 1e+12"
            assert found["command"] == f"lakh plan search {options}"
            assert found["best"] == {"gpus": 64, "name": "dp=64", "step_s": 1.0, "usd_per_step": 2.0} | {
                "memory_bytes": 3,
                "run_days": 5.0,
            }
            assert len(found["pareto"]) == 40
            assert found["goodput"]["words"][2:6] == ["--gpus", "64", "--days", "5.0"]
            assert (await ask(**QUERY | {"model": "llama3-8b"}))[1]["error"] == "w: f; t"
            for name, value in (("model", "../../etc/passwd"), ("cluster", ""), ("gpus", "0"), ("gpus", "nan")):
                assert (await ask(**QUERY | {name: value}))[0] == 400
            for name, value in (("gpus", "1e9"), ("batch", "x"), ("tokens", "1e99"), ("model", "--help")):
                assert (await ask(**QUERY | {name: value}))[0] == 400

    asyncio.run(drive())


def test_a_command_that_fails_or_hangs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = tmp_path / "hang.py"
    hang.write_text("import time\ntime.sleep(600)\n")

    async def drive(command: list[str]) -> str:
        async with client(PlanService(lambda: CHOICES, command)) as ask:
            return str((await ask(**QUERY))[1]["error"])

    assert asyncio.run(drive([sys.executable, "-c", "raise SystemExit(3)"])) == "lakh plan search failed with code 3"
    monkeypatch.setattr("lakh.dashboard.server.lakh_command.TIMEOUT_S", 0.2)
    assert asyncio.run(drive([sys.executable, str(hang)])) == "lakh plan search took over 0.2 s"


def test_without_names_the_page_offers_none(tmp_path: Path) -> None:
    async def drive() -> None:
        runner = web.AppRunner(application(RunCollection(str(tmp_path))))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/plan-choices.json") as answer:
                assert await answer.json() == {"models": [], "clusters": [], "sites": {}}
            async with session.get(f"{base}/plan.json?model=x") as answer:
                assert answer.status == 400
            async with session.get(f"{base}/events") as stream:  # server-sent events, and they end with the server
                lines = [await stream.content.readline() for _ in range(3)]
                assert lines[0] == b"retry: 2000\n"
                assert lines[2].startswith(b"data: ")
                await asyncio.wait_for(runner.cleanup(), 10)

    asyncio.run(drive())
