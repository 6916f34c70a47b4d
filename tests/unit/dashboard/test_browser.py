"""The page in a real browser: it draws, zooms and follows, without errors in the console.

Uses the DevTools protocol of Chromium over a socket; no driver is needed. Skipped where there is no Chromium.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lakh.dashboard.page import page
from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server import application

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        while True:
            heard = await asyncio.wait_for(self._socket.receive_json(), TIMEOUT_S)
            if heard.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(heard["params"]["exceptionDetails"]))
            elif heard.get("method") == "Log.entryAdded" and heard["params"]["entry"]["level"] == "error":
                self.complaints.append(str(heard["params"]["entry"]))
            elif heard.get("id") == self._asked:
                return dict(heard["result"])

    async def ask(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The first true value of the expression; the timeout of the test ends the wait."""
        while not (found := await self.ask(script)):
            await asyncio.sleep(0.05)
        return found


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1200,1600"]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], env={**os.environ, "HOME": str(folder)}, **quiet)
    try:
        port_file = folder / "DevToolsActivePort"
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            # Some systems have a stub of that name, or one that may not write here.
            if process.poll() is not None or time.monotonic() > deadline_s:
                pytest.skip(f"{CHROMIUM} does not start here: apt-get install chromium")
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                [url] = [tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.call("Runtime.enable")
                await tab.call("Log.enable")
                yield tab
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_page_draws_zooms_and_follows_in_a_browser(faulty_run: Any, tmp_path: Path) -> None:
    asyncio.run(_drive(faulty_run, tmp_path))


async def _drive(fake_run: Any, tmp_path: Path) -> None:
    runs = RunCollection(str(fake_run.run_dir))
    runner = web.AppRunner(application(runs))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with browser(tmp_path / "profile") as tab:
            await tab.call("Page.navigate", url=f"http://127.0.0.1:{runner.addresses[0][1]}/")
            await tab.until("document.title.includes('step 120')")
            shown = await tab.ask("document.body.innerText")
            for words in ("Loss, nats per token", "humaneval: pass@1", "Bits per byte", "killed by SIGKILL", "goodput"):
                assert words in shown
            assert await tab.ask("document.querySelectorAll('svg path.mean').length") >= 7
            assert await tab.ask("document.querySelectorAll('svg .whisker').length") == 4
            assert await tab.ask("document.querySelectorAll('svg .m-serious').length") > 2
            assert not await tab.ask(
                "[...document.querySelectorAll('path')].some(p => /NaN|Infinity/.test(p.getAttribute('d')))"
            )

            # Pointing at one chart reads all of them; dragging zooms in, a double click zooms out.
            box = await tab.ask(
                "(r => [r.left, r.top, r.width])(document.querySelector('svg').getBoundingClientRect())"
            )
            left, top, width = box
            await _mouse(tab, "mouseMoved", left + 0.5 * width, top + 60)
            assert await tab.until(
                "[...document.querySelectorAll('.read')].filter(r => r.textContent.startsWith('step')).length > 3"
            )
            await _mouse(tab, "mousePressed", left + 0.3 * width, top + 60)
            await _mouse(tab, "mouseMoved", left + 0.6 * width, top + 60)
            await _mouse(tab, "mouseReleased", left + 0.6 * width, top + 60)
            assert await tab.until("document.getElementById('whole') !== null && view.window !== null")
            await tab.until("view.data.details[0].curves.loss.step.length < 60")  # the server sent only this part
            await tab.ask("document.getElementById('whole').click()")
            await tab.until("document.getElementById('whole') === null")
            await tab.ask("document.getElementById('by-time').click()")
            assert await tab.ask("document.querySelector('svg').textContent.includes(':')")

            # New events appear without interaction.
            await _mouse(tab, "mouseMoved", 2, 2)
            fake_run.begin(120)
            fake_run.steps(121, 126)
            await tab.until("document.title.includes('step 126')")

            # On a phone nothing overflows; a saved page needs no server.
            await tab.call(
                "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=2, mobile=True
            )
            await tab.until("document.documentElement.scrollWidth <= 390")
            saved = tmp_path / "page.html"
            saved.write_text(page(runs.data()))
            await runner.cleanup()
            await tab.call("Page.navigate", url=saved.as_uri())
            await tab.until("document.querySelectorAll('svg path.mean').length >= 7")
            assert "saved" in await tab.ask("document.getElementById('alive').textContent")

            # Of many runs the newest few are drawn, and the page states that.
            for number in range(10):
                sweep = type(fake_run)(tmp_path / "many" / f"sweep-{number}")
                sweep.begin()
                sweep.steps(1, 3)
            many = RunCollection(str(tmp_path / "many"))
            many.read_all()
            saved.write_text(page(many.data()))
            await tab.call("Page.navigate", url=saved.as_uri())
            await tab.until("document.querySelectorAll('tbody tr').length === 10")
            assert "the 8 most recent of 10 runs" in await tab.ask("document.body.innerText")

            # The table of runs is searched and sorted, and the settings in which runs differ are listed.
            names = "[...document.querySelectorAll('tbody a')].map(a => a.textContent).join()"
            await tab.ask("document.querySelectorAll('button.sort')[0].click()")
            assert await tab.ask(names) == ",".join(f"sweep-{number}" for number in range(10))
            await tab.ask("document.querySelectorAll('button.sort')[0].click()")
            assert (await tab.ask(names)).startswith("sweep-9,sweep-8")
            typed = "(box => { box.value = 'SWEEP-3'; box.dispatchEvent(new Event('input')); })"
            await tab.ask(f"{typed}(document.getElementById('search-search'))")
            assert await tab.ask(names) == "sweep-3"
            for number, steps in enumerate((100, 200)):
                text = f"[train]\nsteps = {steps}\nseed = 1\n"
                (tmp_path / "many" / f"sweep-{number}" / "run.toml").write_text(text)
            for number in range(2, 10):
                shutil.rmtree(tmp_path / "many" / f"sweep-{number}")
            pair = RunCollection(str(tmp_path / "many"))
            pair.read_all()
            saved.write_text(page(pair.data()))
            await tab.call("Page.navigate", url=saved.as_uri())
            differing = (
                "[...document.querySelectorAll('#settings tbody td')].map(cell => cell.textContent).sort().join()"
            )
            assert await tab.until(differing) == "100,200,train.steps"
            assert tab.complaints == []
    finally:
        await runner.cleanup()


async def _mouse(tab: Tab, kind: str, x: float, y: float) -> None:
    pressed = (
        {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1, "clickCount": 1}
        if kind != "mouseMoved"
        else {}
    )
    await tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)
