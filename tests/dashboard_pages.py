"""Drive every page of a run's dashboard in Chromium, and compare what it shows with the run's events and files."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import tomllib
from pathlib import Path

from aiohttp import web
from tests.browser import Tab, browser, serious_violations

from lakh import events
from lakh.cli.dashboard import plan_choices
from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server import application
from lakh.goodput import goodput

__all__ = ["check_pages"]

MAX_FIRST_PAGE_BYTES = 300_000
MAX_POINTS = 600
"""Of a curve, unless the page is zoomed in."""
LOCAL = ("http://127.0.0.1:", "data:", "blob:")


def check_pages(run_dir: Path, *, is_live: bool) -> list[str]:
    """The titles of the pages that were driven. Raises AssertionError for whatever is wrong."""
    return asyncio.run(_check(run_dir, is_live))


async def _check(run_dir: Path, is_live: bool) -> list[str]:
    runner = web.AppRunner(application(RunCollection(str(run_dir)), plan_choices=plan_choices))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Chromium's helpers may still write
            async with browser(Path(folder)) as tab:
                await tab.call("Page.navigate", url=f"http://127.0.0.1:{runner.addresses[0][1]}/")
                await tab.until("document.querySelectorAll('.chart canvas').length > 2 && view.data.details.length")
                entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
                size_bytes = await tab.ask(f"{entries}.reduce((sum, one) => sum + one.transferSize, 0)")
                assert 0 < size_bytes < MAX_FIRST_PAGE_BYTES, size_bytes
                titles = await tab.ask("[...document.querySelectorAll('nav.pages a')].map(link => link.textContent)")
                for number, title in enumerate(titles):
                    await tab.ask(f"document.querySelectorAll('nav.pages a')[{number}].click()")
                    current = "document.querySelector('nav.pages a[aria-current=page]')?.textContent"
                    await tab.until(f"{current} === {json.dumps(title)} && document.querySelector('.card') !== null")
                    assert await serious_violations(tab) == [], title
                    await VALUES[title](tab, run_dir, is_live)
                assert [url for url in tab.requested if not url.startswith(LOCAL)] == []
                assert tab.complaints == []
                return list(titles)
    finally:
        await runner.cleanup()


async def _overview(tab: Tab, run_dir: Path, is_live: bool) -> None:
    csv = await tab.ask("csvText(charts[0])")
    rows = [line.split(",") for line in csv.splitlines()[1:]]
    written = events.read(run_dir, rank=0)  # after the page: it holds all that the page shows
    losses: dict[int, set[float]] = {}
    for event in written:
        if isinstance(event, events.StepDone):
            losses.setdefault(event.step, set()).add(event.loss)
    shown = {int(float(row[2])): float(row[4]) for row in rows if row[:2] == ['"training"', "measured"]}
    assert shown
    for step, loss in shown.items():
        assert any(math.isclose(loss, one, rel_tol=1e-5) for one in losses[step]), step
    heldout = {event.step: event.loss for event in written if isinstance(event, events.Evaluated)}
    for row in rows:
        if row[0] == '"held-out"':
            assert math.isclose(float(row[4]), heldout[int(float(row[2]))], rel_tol=1e-5)
    if not is_live:
        assert len(shown) == len(losses) if len(losses) <= MAX_POINTS else MAX_POINTS / 2 < len(shown) <= MAX_POINTS
        tiles = await tab.ask("[...document.querySelectorAll('.tile')].map(one => one.innerText.split('\\n'))")
        values = {words[0]: words[1] for words in tiles}
        ratio = goodput(written)["ratio"]
        assert math.isclose(float(values["goodput"].rstrip(" %")), 100 * ratio, abs_tol=0.06), (values, ratio)
        assert await tab.ask("document.querySelector('.pill').textContent") == "done"


async def _goodput(tab: Tab, run_dir: Path, is_live: bool) -> None:
    kind_cells = "[...document.querySelectorAll('#interruptions tbody td:nth-child(3)')].map(cell => cell.innerText)"
    rows = sum(kind != "stop" for kind in await tab.ask(kind_cells))  # stops on request are no failures
    kinds = (events.RanksLost, events.Restarted)
    failures = sum(isinstance(event, kinds) for event in events.read(run_dir, rank=0))
    assert rows >= failures if is_live else rows == failures
    assert await tab.ask("document.querySelector('.shares i') !== null")


async def _fleet(tab: Tab, run_dir: Path, is_live: bool) -> None:
    world = max(event.world for event in events.read(run_dir) if isinstance(event, events.RunStarted))
    assert await tab.ask("document.querySelectorAll('.rank').length") == world


async def _data(tab: Tab, run_dir: Path, is_live: bool) -> None:
    tokens = Path(tomllib.loads((run_dir / "run.toml").read_text())["data"]["tokens"])
    manifest = json.loads((tokens.parent / "corpus" / "manifest.json").read_text())
    rows = await tab.ask("[...document.querySelectorAll('#training-data tbody tr')].map(row => row.innerText)")
    numbers = {row.split("\t")[0]: row.split("\t")[1].replace(",", "") for row in rows}
    assert (int(numbers["files read"]), int(numbers["documents kept"])) == (manifest["read"], manifest["kept"])
    # lakh corpus report has answered
    await tab.until("!document.body.innerText.includes('reading …')")
    reasons = await tab.ask(
        "[...document.querySelectorAll('#dropped tbody tr td:first-child')].map(one => one.innerText)"
    )
    assert {reason.replace(" ", "-") for reason in reasons} == {name for name, n in manifest["dropped"].items() if n}
    duplicates = sum(manifest["dropped"].get(kind, 0) for kind in ("exact-duplicate", "near-duplicate"))
    assert (await tab.ask("document.getElementById('clusters') !== null")) == (duplicates > 0)


async def _evaluations(tab: Tab, run_dir: Path, is_live: bool) -> None:
    results = [json.loads(path.read_text()) for path in (run_dir / "evals").rglob("result.json")]
    shown = await tab.ask("document.getElementById('evaluations')?.innerText ?? ''")
    for result in (found for found in results if "passed" in found and not is_live):
        assert f"{result['passed']:,} of {result['total']:,}" in shown


VALUES = {"Overview": _overview, "Goodput": _goodput, "Fleet": _fleet, "Data": _data, "Evaluations": _evaluations}
