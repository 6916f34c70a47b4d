"""The playground of the dashboard: the server's own page, and its completions through the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.browser import browser, needs_chromium, serious_violations
from tests.unit.server.conftest import make_engine, tokenizer_json

from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server import application
from lakh.dashboard.server.playground import Playground, server_url
from lakh.errors import UserError
from lakh.server.api import playground as playground_page
from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.model import runner as model_runner
from lakh.server.speculation import proposer
from lakh.server.speculation.policy import DraftLength

__all__ = ["make_engine", "tokenizer_json"]

TIMEOUT_S = 120.0
TOKEN = "a-token-of-the-dashboard"
JSON = {"Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def dashboard(folder: Path, url: str | None, token: str | None = None) -> AsyncIterator[str]:
    page = Playground(playground_page.page(), playground_page.HEADERS, url)
    runner = web.AppRunner(application(RunCollection(str(folder)), token=token, playground=page))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/playground"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fake_server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


@pytest.fixture
def drafting_engine(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose completions repeat three tokens, so that draft tokens found in the text are accepted."""
    engine = make_engine(context=512, options={"speculation": "lookup"})

    def looping(logits: Any, *_: object) -> list[int]:
        last = engine.scheduler.running[0].tokens[-1:] or [22]
        return [20 + (last[0] - 20 + 1 + i) % 3 for i in range(len(logits))]

    monkeypatch.setattr(model_runner, "most_likely", looping)
    monkeypatch.setattr(proposer, "choose_draft_length", lambda **_: DraftLength(5, "the test requires it"))
    return engine


def test_completions_are_forwarded_with_their_usage(tmp_path: Path, drafting_engine: Engine) -> None:
    async def scenario() -> None:
        engine = drafting_engine
        async with (
            running(InProcessBackend(engine), "127.0.0.1", 0) as server,
            dashboard(tmp_path, server.url) as url,
            aiohttp.ClientSession() as session,
        ):
            async with session.get(f"{url}/") as answer:
                assert await answer.text() == playground_page.page()
                assert answer.headers["Content-Security-Policy"] == playground_page.HEADERS["Content-Security-Policy"]
            async with session.get(f"{url}/ready") as answer:
                assert (answer.status, (await answer.json())["model"]) == (200, "tiny")
            body = {"prompt": "def add(a, b):\n" * 4, "max_tokens": 60, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                whole = await answer.json()
            details = whole["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == engine.counters.accepted_tokens > 0
            assert sum(details.values()) == engine.counters.draft_tokens

            stream = body | {"stream": True, "stream_options": {"include_usage": True}, "seed": 2}
            async with session.post(f"{url}/v1/completions", json=stream) as answer:
                assert answer.content_type == "text/event-stream"
                lines = (await answer.text()).split("\n\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            pieces = [choice for event in events for choice in event["choices"]]
            assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]
            shown = sum(piece.get("accepted_prediction_tokens", 0) for piece in pieces)
            assert shown == events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0

            async with session.post(f"{url}/v1/completions", json={"prompt": 3.5}) as answer:
                assert answer.status == 400
                assert "prompt" in (await answer.json())["error"]["message"]

    run(scenario())


def test_without_a_server_the_page_says_how_to_start_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with dashboard(tmp_path, None) as url, aiohttp.ClientSession() as session:
            async with session.get(f"{url}/ready") as answer:
                assert (answer.status, "--server URL" in (await answer.json())["status"]) == (503, True)
            async with session.post(f"{url}/v1/completions", json={}) as answer:
                assert (answer.status, "--server URL" in (await answer.json())["error"]["message"]) == (503, True)
            async with session.get(url, allow_redirects=False) as answer:
                assert answer.headers["Location"] == "/playground/"
        async with dashboard(tmp_path, "http://127.0.0.1:1") as url, aiohttp.ClientSession() as session:
            async with session.get(f"{url}/ready") as answer:
                assert "lakh serve MODEL" in (await answer.json())["status"]
            async with session.post(f"{url}/v1/completions", json={}) as answer:
                assert (answer.status, "does not answer" in (await answer.json())["error"]["message"]) == (502, True)

    run(scenario())


def test_the_token_stays_here_and_other_sites_cannot_ask(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    async def answer_all(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization"), request.headers.get("Cookie")))
        return web.json_response({"choices": []})

    async def scenario() -> None:
        async with (
            fake_server(answer_all) as server,
            dashboard(tmp_path, server, TOKEN) as url,
            aiohttp.ClientSession() as session,
        ):
            post = f"{url}/v1/completions"
            async with session.post(post, json={}) as answer:
                assert answer.status == 401
            async with session.post(post, json={}, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == 200
            known = {"Cookie": f"lakh_dashboard_token={TOKEN}"}
            keyed = {**known, "Authorization": "Bearer of-the-server"}
            async with session.post(post, json={}, headers=keyed) as answer:
                assert answer.status == 200
            async with session.post(post, data="{}", headers={**known, "Content-Type": "text/plain"}) as answer:
                assert answer.status == 415
            async with session.post(f"{url}/v1/models", json={}, headers=known) as answer:
                assert answer.status in (404, 405)
        assert seen == [("/v1/completions", None, None), ("/v1/completions", "Bearer of-the-server", None)]

    run(scenario())


def test_markup_and_redirects_of_a_server_are_not_forwarded(tmp_path: Path) -> None:
    async def hostile(request: web.Request) -> web.Response:
        if request.path == "/ready":
            return web.Response(text="<script>alert(1)</script>", content_type="text/html")
        return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})

    async def scenario() -> None:
        async with (
            fake_server(hostile) as server,
            dashboard(tmp_path, server) as url,
            aiohttp.ClientSession() as session,
        ):
            async with session.get(f"{url}/ready") as answer:
                assert answer.content_type == "application/json"
            async with session.post(f"{url}/v1/completions", json={}, allow_redirects=False) as answer:
                assert (answer.status, "is it a server?" in (await answer.json())["error"]["message"]) == (502, True)

    run(scenario())


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:port", "http://h/v1", "http://u@h"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--server"):
        server_url(text)
    assert server_url("https://host:1/") == "https://host:1"


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_browser_completes_and_shows_cached_and_accepted_tokens(
    faulty_run: Any, tmp_path: Path, drafting_engine: Engine
) -> None:
    async def scenario() -> None:
        engine = drafting_engine
        async with (
            running(InProcessBackend(engine), "127.0.0.1", 0) as server,
            dashboard(faulty_run.run_dir, server.url) as url,
            browser(tmp_path / "profile") as tab,
        ):
            await tab.call("Page.navigate", url=url.removesuffix("playground"))
            await tab.until("!document.getElementById('tools').hidden")
            await tab.ask("document.getElementById('to-playground').click()")
            await tab.until("document.getElementById('server')?.textContent === 'tiny is ready'")
            code = "'def add(a, b):\\n'.repeat(8)"
            await tab.ask(f"byId('code').value = {code}; byId('middle').checked = false; byId('tokens').value = 60")
            for _ in range(2):  # the second prompt begins with what the first has computed
                await tab.ask("byId('speed').textContent = '–'")
                await tab.ask("byId('code').selectionStart = byId('code').value.length; complete()")
                await tab.until("byId('speed').textContent !== '–' && byId('stop').disabled")
            counters = engine.counters
            assert await tab.ask("byId('new').textContent") == "60"
            assert int(await tab.ask("byId('cached').textContent")) == counters.cached_tokens > 0
            assert await tab.ask("document.querySelector('#before .cached').textContent.length") > 0
            kept = "[...document.querySelectorAll('#text .drafted')].map(one => parseInt(one.title.split(', ')[1]))"
            marked, accepted = sum(await tab.ask(kept)), await tab.ask("byId('drafts').textContent")
            assert marked == int(accepted.split()[0]) > 0
            assert await tab.ask("byId('text').textContent.length") > 0
            assert await serious_violations(tab) == []
            local = ("http://127.0.0.1:", "data:")
            assert [one for one in tab.requested if not one.startswith(local)] == []
            assert tab.complaints == []

    run(scenario())
