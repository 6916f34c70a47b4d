"""Chromium over its DevTools protocol, without a driver: open pages, evaluate scripts, collect console errors."""

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

__all__ = ["CHROMIUM", "Tab", "browser", "needs_chromium", "serious_violations"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
AXE = Path(__file__).resolve().parent / "data" / "axe-core" / "axe.min.js"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


class DevToolsError(Exception):
    """Chromium's refusal of a command, in its own words."""


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        while True:
            heard = await asyncio.wait_for(self._socket.receive_json(), TIMEOUT_S)
            if heard.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(heard["params"]["exceptionDetails"]))
            elif heard.get("method") == "Log.entryAdded" and heard["params"]["entry"]["level"] == "error":
                self.complaints.append(str(heard["params"]["entry"]))
            elif heard.get("method") == "Network.requestWillBeSent":
                self.requested.append(str(heard["params"]["request"]["url"]))
            elif heard.get("id") == self._asked:
                if "error" in heard:
                    raise DevToolsError(f"{method}: {heard['error'].get('message')}")
                return dict(heard["result"])

    async def ask(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The first true value of the expression; the timeout of the test ends the wait.

        A page that is replaced while it evaluates answers with an error: the next page is asked then.
        """
        while True:
            with contextlib.suppress(DevToolsError):
                if found := await self.ask(script):
                    return found
            await asyncio.sleep(0.05)


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
                await tab.call("Network.enable")
                yield tab
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


async def serious_violations(tab: Tab) -> list[str]:
    """What axe-core calls serious or critical on the page as it is shown now."""
    if not await tab.ask("typeof axe === 'object'"):
        await tab.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
    script = "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)"
    found = await tab.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
    return [
        f"{rule['id']}: {rule['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for rule in found["result"]["value"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"][:5]
    ]
