"""The example of docs/how-to/add-an-api-dialect.md works as written."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakh.server.api import http
from lakh.server.api.dialects import DIALECTS
from lakh.server.api.dialects.dialect import DialectResponse
from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams

PAGE = Path(__file__).parents[3] / "docs/how-to/add-an-api-dialect.md"


def test_the_dialect_of_the_docs_page_is_served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len((code + test).splitlines()) < 150
    names: dict[str, Any] = {"DialectResponse": DialectResponse}
    exec(code + "\n\n" + test, names)
    names["test_tgi_names_become_openais_and_back"]()
    monkeypatch.setattr(http, "DIALECTS", (*DIALECTS, names["TGI"]))
    expected = engine.generate(["def "], SamplingParams(max_tokens=5))[0].text

    async def scenario() -> None:
        async with running(InProcessBackend(engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
            body = {"inputs": "def ", "parameters": {"max_new_tokens": 5}}
            async with session.post(f"{server.url}/generate", json=body) as response:
                assert (response.status, await response.json()) == (200, {"generated_text": expected})

    asyncio.run(asyncio.wait_for(scenario(), 120))
