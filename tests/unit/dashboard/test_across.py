"""The plan for several sites on the plan page: a search in the background, its map, and what crosses which link."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from lakh.dashboard.server.across import AcrossService
from lakh.dashboard.server.site_map import crossings, site_map

SITES: dict[str, Any] = {
    "sites": [{"name": "a", "gpus": 64}, {"name": "<b>", "gpus": 16}, {"name": "c", "gpus": 64}],
    "links": [
        {"between": ["a", "<b>"], "distance_km": 40.0, "bandwidth_Tbps": 25.6},
        {"between": ["<b>", "c"], "distance_km": 150.0, "bandwidth_Tbps": 12.8},
    ],
}
ROW = {"step_s": 1.5, "usd_per_step": 2.0, "placement": "a (2) -> <b> (2)", "crossing": "pipeline", "tp": 8, "pp": 4}
FAKE = f"""
import json, sys, time
if "slow" in sys.argv:
    time.sleep(600)
best = {ROW!r} | {{"groups": [{{"a": 2, "<b>": 2}}]}}
default = {ROW!r} | {{"groups": [{{"a": 4}}, {{"c": 4}}], "step_s": 3.0}}
print(json.dumps({{"best": best, "best_as_built": best, "baselines": {{"production": default}}, "why": "because",
    "gain": {{"production": 0.5}}, "gain_as_built": {{"production": 0.4}}, "searched": 9, "seconds": 1.0, "notes": [],
    "words": sys.argv[1:]}}))
"""
ANSWER_TIMEOUT_S = 60.0


def test_what_crosses_each_link_follows_from_the_placement() -> None:
    ab, bc = frozenset(("a", "<b>")), frozenset(("<b>", "c"))
    assert crossings(SITES, [{"a": 2, "<b>": 2}]) == {ab: "pipeline"}
    assert crossings(SITES, [{"a": 4}, {"c": 4}]) == {ab: "data", bc: "data"}, "through the site between them"
    assert crossings(SITES, [{"a": 2, "<b>": 2}, {"c": 4}]) == {ab: "data and pipeline", bc: "data"}
    assert crossings(SITES, [{"a": 4}]) == {}


def test_the_map_places_sites_by_distance_and_escapes_names() -> None:
    picture = ET.fromstring(site_map(SITES, [{"a": 2, "<b>": 2}]))
    place = "{http://www.w3.org/2000/svg}"
    at = [(float(one.get("cx", "nan")), float(one.get("cy", "nan"))) for one in picture.iter(f"{place}circle")]
    assert len(at) == 3
    assert all(0 < x < 1100 and 0 < y < 400 for x, y in at)
    (ax, ay), (bx, by), (cx, cy) = at
    near, far = ((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5, ((cx - bx) ** 2 + (cy - by) ** 2) ** 0.5
    assert abs(far / near - 150 / 40) < 0.1
    texts = [one.text for one in picture.iter(f"{place}text")]
    assert {"<b>", "40 km, 25.6 Tbit/s", "pipeline", "not used", "16 GPUs, 2 of 4 stages", "64 GPUs, not used"} <= {
        *texts
    }


@contextlib.asynccontextmanager
async def asking(service: AcrossService) -> AsyncIterator[Callable[..., Awaitable[tuple[int, Any]]]]:
    """A server with this service, and a function that asks it: the status, and the answer or its text."""
    app = web.Application()
    app.router.add_get("/across.json", service.handle)
    app.on_shutdown.append(service.stop)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:

        async def ask(**query: str) -> tuple[int, Any]:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/across.json"
            async with session.get(url, params={"sites": "three"} | query) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if answer.status == 200 else text

        yield ask
    await asyncio.wait_for(runner.cleanup(), ANSWER_TIMEOUT_S)


async def wait_for_answer(ask: Callable[..., Awaitable[tuple[int, Any]]], **query: str) -> Any:
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while "searching" in (found := (await ask(**query))[1]):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
    return found


def test_a_search_runs_in_the_background_and_another_question_ends_it(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    service = AcrossService(
        lambda: {"models": ["quick", "slow"], "sites": {"three": SITES}}, [sys.executable, str(fake)]
    )

    async def drive() -> None:
        async with asking(service) as ask:
            for name, value in (("sites", "../x"), ("model", "--help"), ("batch", "0"), ("sequence", "x")):
                assert (await ask(**{"model": "quick"} | {name: value}))[0] == 400
            assert (await ask(model="slow"))[1]["searching"]["limit_s"] == 300
            found = await wait_for_answer(ask, model="quick", batch="64")
            assert found["command"] == "lakh plan across three --model quick --batch 64"
            assert found["rows"]["production default"]["step_s"] == 3.0
            assert (found["gain"], found["gain_as_built"]) == (0.5, 0.4)
            assert found["map"].startswith("<svg")
            assert found["map"] != found["default_map"]

    asyncio.run(drive())


def test_a_search_that_fails_or_takes_too_long_is_one_line_and_can_be_repeated(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    service = AcrossService(lambda: {"models": ["m"], "sites": {"three": SITES}}, command, timeout_s=0.2)

    async def drive() -> None:
        async with asking(service) as ask:
            assert (await wait_for_answer(ask, model="m"))["error"] == "lakh plan across took over 0.2 s"
            assert "searching" in (await ask(model="m"))[1]

    asyncio.run(drive())
