"""The page at `GET /` is self-contained, and its policy allows nothing from elsewhere."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest

from lakh.server.api import playground
from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine


def test_the_page_is_served_with_a_strict_policy(engine: Engine) -> None:
    async def scenario() -> None:
        async with (
            running(InProcessBackend(engine), "127.0.0.1", 0) as server,
            aiohttp.ClientSession() as session,
            session.get(f"{server.url}/") as response,
        ):
            assert (response.status, response.content_type) == (200, "text/html")
            policy = response.headers["Content-Security-Policy"]
            assert await response.text() == playground.page()
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "http" not in policy

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_page_needs_nothing_else_and_writes_no_html() -> None:
    page = playground.page()
    assert "/*S" not in page  # style and script are in place
    assert not re.search(r"(src|href)=|url\(|https?://|@import|style=|\bon\w+=", page)
    assert "innerHTML" not in page  # a completion may contain markup
    ids = set(re.findall(r'byId\("(\w+)"\)', page)) | set(re.findall(r'show\("(\w+)"', page))
    assert ids <= set(re.findall(r'id="(\w+)"', page))


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the script's syntax")
def test_the_script_is_valid(tmp_path: Path) -> None:
    script = tmp_path / "playground.mjs"
    script.write_text(playground._part("playground.js"))
    subprocess.run(["node", "--check", str(script)], check=True, timeout=60)
