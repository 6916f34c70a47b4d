"""The pages in a real browser: they draw, zoom and follow, without console errors or accessibility violations."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.browser import Tab, browser, needs_chromium, serious_violations
from tests.unit.dashboard.hostile_run import write_hostile_run

from lakh.dashboard.page import page
from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server import application


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_page_draws_zooms_and_follows_in_a_browser(faulty_run: Any, tmp_path: Path) -> None:
    asyncio.run(_drive(faulty_run, tmp_path))


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_evaluations_and_training_data_are_shown_as_text(
    faulty_run: Any, new_evaluation: Any, new_data: Any, tmp_path: Path
) -> None:
    markup = "<img src=x onerror=document.title='hurt'>"
    samples = [("T/0", "    return 1\n", "passed"), (markup, markup, "failed")]
    new_evaluation(faulty_run.run_dir / "evals" / "00000100" / "humaneval", samples)
    settings = f'[data]\ntokens = "{new_data(tmp_path / "data")}"\n[train]\nsteps = 120\n'
    (faulty_run.run_dir / "run.toml").write_text(settings)
    asyncio.run(_drive_evaluations(faulty_run, tmp_path))


async def _drive_evaluations(fake_run: Any, tmp_path: Path) -> None:
    runs = RunCollection(str(fake_run.run_dir))
    runs.read_all()
    saved = tmp_path / "page.html"
    saved.write_text(page(runs.data_with_samples()))
    runner = web.AppRunner(application(runs))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with browser(tmp_path / "profile") as tab:
            for url in (f"http://127.0.0.1:{runner.addresses[0][1]}/", saved.as_uri()):
                await tab.call("Page.navigate", url=url + "#run/evaluations")
                await tab.until(
                    f"location.href.startsWith('{url}') && document.querySelector('#evaluations tbody tr') !== null"
                )
                assert await serious_violations(tab) == []
                row = await tab.ask("document.querySelector('#evaluations tbody tr').innerText")
                for words in ("humaneval", "step 100", "1 of 2", "50 %", "10 % to 90 %", "1 passed, 1 failed"):
                    assert words in row
                await tab.ask("document.querySelector('button.samples').click()")
                await tab.until("document.querySelectorAll('.samples details').length === 2")
                assert await tab.ask("document.querySelectorAll('.samples pre')[0].textContent") == "    return 1\n"
                await tab.ask("[...document.querySelectorAll('.samples .group button')].at(-1).click()")
                assert await tab.ask("document.querySelectorAll('.samples details').length") == 1
                assert "<img" in await tab.ask("document.querySelector('.samples pre').textContent")
                assert await tab.ask("document.images.length") == 0
                await tab.ask("location.hash = '#run/data'")
                await tab.until("document.querySelector('#training-data tbody tr') !== null")
                assert await serious_violations(tab) == []
                funnel = "[...document.querySelectorAll('#training-data tbody tr')].map(row => row.innerText)"
                cells = [re.split(r"\s*\t\s*", line.strip()) for line in await tab.ask(funnel)]
                assert cells == [
                    ["files read", "100", "5 MB"],
                    ["dropped: not code", "30", "2 MB"],
                    ["dropped: licence", "10"],
                    ["documents kept", "60", "3 MB"],
                    ["train documents", "55", "1.5M tokens"],
                    ["held-out documents", "5", "900 tokens"],
                ]
            assert tab.complaints == []
    finally:
        await runner.cleanup()


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
            assert await tab.ask("document.querySelectorAll('.chart canvas').length") >= 7
            drawn = "charts.filter(one => one.plot).every(one => one.plot.series.length > 1 && one.plot.data[0].length)"
            assert await tab.ask(drawn)

            # The points are those of the events.
            csv = await tab.ask("csvText(charts[0])")
            rows = [line.split(",") for line in csv.splitlines()[1:]]
            measured = {int(row[2]): float(row[4]) for row in rows if row[:2] == ['"training"', "measured"]}
            assert measured == {step: pytest.approx(4.0 + 4.0 / step, rel=1e-5) for step in range(1, 121)}
            assert {int(row[2]) for row in rows if row[1] == "lost"} == set(range(51, 71))
            assert [(row[2], row[4]) for row in rows if row[0] == '"held-out"'] == [("50", "4.2"), ("100", "4.1")]
            score = await tab.ask("csvText(charts.find(one => one.options.title.startsWith('humaneval')))")
            assert [line.split(",")[4:] for line in score.splitlines()[1:]] == [
                ["0.1", "0.05", "0.2"],
                ["0.3", "0.15", "0.6"],
            ]
            await tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
            await tab.ask("document.querySelector('button.csv').click()")
            while not (tmp_path / "saved" / "Loss-nats-per-token.csv").exists():
                await asyncio.sleep(0.05)

            # Legend entries hide their lines; scale and smoothing change what is drawn.
            series = "charts[0].plot.series.length - 1"
            assert await tab.ask(series) == 4  # every step, its mean, lost steps, held-out
            await tab.ask("document.querySelector('.legend .key').click()")
            assert await tab.ask(series) == 2
            assert await tab.ask("document.querySelector('.legend .key').getAttribute('aria-pressed')") == "false"
            await tab.ask("document.querySelector('.legend .key').click()")
            choose = (
                "((id, value) => { const box = byId(id); box.value = value; box.dispatchEvent(new Event('change')); })"
            )
            await tab.ask(f"{choose}('smoothing', 'off')")
            assert await tab.ask(series) == 3
            await tab.ask(f"{choose}('smoothing', 'most')")
            mean = "smoothed({value: [0, 8, 0, 8, 0, null, 0, 8, 0]}).value"  # windows of up to 3 of the 9 points
            assert await tab.ask(mean) == [0, 8 / 3, 16 / 3, 8 / 3, 4, 0, 4, 8 / 3, 0]
            for scale, distribution in (("log", 3), ("linear", 1)):
                await tab.ask(f"{choose}('scale', '{scale}')")
                assert await tab.ask("charts[0].plot.scales.y.distr") == distribution
            await tab.ask(f"{choose}('smoothing', 'mean')")
            await tab.ask(f"{choose}('scale', 'auto')")

            # Pointing at one chart reads all of them; dragging zooms in, a double click zooms out.
            box = await tab.ask(
                "(r => [r.left, r.top, r.width])(document.querySelector('.u-over').getBoundingClientRect())"
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
            assert await tab.ask("charts[0].plot.data[0][0]") > 1e9

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
            await tab.until("charts.filter(one => one.plot).length >= 7")
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
            local = ("http://127.0.0.1:", "file://", "data:", "blob:")
            assert [url for url in tab.requested if not url.startswith(local)] == []
    finally:
        await runner.cleanup()


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_page_of_a_run_shows_its_values_and_is_accessible(faulty_run: Any, tmp_path: Path) -> None:
    settings = '[train]\nsteps = 130\n[mesh]\ndp_shard = 2\n[[cluster.tiers]]\nname = "node"\nsize = 1\n'
    (faulty_run.run_dir / "run.toml").write_text(settings)
    faulty_run.event("step_predicted", step=120, step_s=0.8, low_s=0.7, high_s=1.1, basis="factor 0.781 <b>")
    for step in range(121, 131):
        faulty_run.event("step_done", step=step, after_s=1.0, loss=1.0, step_s=1.0, slowest_rank=1, straggler_s=0.25)
    finding = {
        "time_s": 5.0,
        "node": "node-7",
        "serial": "<b>1",
        "check": "ecc",
        "level": "drain",
        "reason": "too many",
    }
    (tmp_path / "health.jsonl").write_text(json.dumps(finding) + "\n")
    asyncio.run(_drive_pages(faulty_run, tmp_path))


async def _drive_pages(fake_run: Any, tmp_path: Path) -> None:
    runs = RunCollection(str(fake_run.run_dir))
    runs.read_all()
    saved = tmp_path / "page.html"
    saved.write_text(page(runs.data()))
    async with browser(tmp_path / "profile") as tab:
        await tab.call("Page.navigate", url=saved.as_uri())
        for theme in ("light", "dark"):
            await tab.until("document.querySelector('nav.pages') !== null")
            await tab.ask(f"document.documentElement.dataset.theme = '{theme}'; show()")
            assert await serious_violations(tab) == [], theme
        links = "[...document.querySelectorAll('nav.pages a')].map(a => a.textContent).join()"
        assert await tab.ask(links) == "Overview,Goodput,Fleet,Evaluations"

        told = await tab.ask("document.querySelector('#step-time .hint').textContent")
        assert told.startswith(
            "predicted 0.8 s (80 %: 0.7 s to 1.1 s), measured 1 s: 25 % longer, inside the interval."
        )
        assert "factor 0.781 <b>" in told
        csv = await tab.ask("csvText(charts.find(one => one.options.title.startsWith('Step time')))")
        predicted = [line.split(",")[2:] for line in csv.splitlines() if line.startswith('"predicted",predicted')]
        assert [(row[0], row[2:]) for row in predicted] == [(step, ["0.8", "0.7", "1.1"]) for step in ("1", "130")]
        assert "a random choice among 4,096 tokens" in await tab.ask("document.getElementById('words').textContent")

        await tab.ask("document.querySelector('nav.pages a[href$=goodput]').click()")
        await tab.until("document.querySelector('#interruptions') !== null")
        cells = "[...document.querySelectorAll('#interruptions tbody td')].map(cell => cell.textContent)"
        row = await tab.ask(cells)
        assert row[1:4] == ["70", "restart", "rank 1 was killed by SIGKILL"]
        assert row[6].startswith("20 (20 s)")
        assert await tab.ask("document.querySelector('nav.pages a[aria-current=page]').textContent") == "Goodput"
        assert await serious_violations(tab) == []

        await tab.ask("location.hash = '#run/fleet'")
        await tab.until("document.querySelector('#stragglers') !== null")
        assert await tab.ask("[...document.querySelectorAll('.node')].map(node => node.children.length)") == [1, 1]
        title = await tab.ask("document.querySelectorAll('.rank')[1].title")
        assert title == "rank 1 (node 1, dp_shard 1): unknown, waited for 2.5 s"
        shown = await tab.ask("document.getElementById('slowest').innerText")
        assert "10 steps" in shown
        assert "2.5 s" in shown
        assert "<b>1" in await tab.ask("document.getElementById('offenders').innerText")
        assert await serious_violations(tab) == []
        await tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=2, mobile=True)
        await tab.until("document.documentElement.scrollWidth <= 390")
        await tab.call("Emulation.setEmulatedMedia", media="print")
        assert await tab.ask("getComputedStyle(document.querySelector('nav.pages')).display") == "none"
        assert tab.complaints == []


async def _mouse(tab: Tab, kind: str, x: float, y: float) -> None:
    pressed = (
        {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1, "clickCount": 1}
        if kind != "mouseMoved"
        else {}
    )
    await tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_plan_page_answers_when_an_input_changes(
    faulty_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def searched(*words: str, **options: Any) -> dict[str, Any]:
        await asyncio.sleep(1.5)  # the page asks more than once
        row = {"usd_per_step": 2.0, "placement": " ".join(words), "crossing": "pipeline", "groups": [{"a": 2, "b": 2}]}
        row |= {"tp": 8, "pp": 4, "schedule": "1f1b", "routing": "ecmp", "transport": "go-back-n"}
        rows = [row | {"step_s": step_s} for step_s in (1.5, 3.0)]
        gains = {name: {"production": 0.5} for name in ("gain", "gain_as_built")}
        known = {"why": "because", "searched": 9, "seconds": 1.0, "notes": []}
        return {"best": rows[0], "best_as_built": rows[0], "baselines": {"production": rows[1]}} | gains | known

    monkeypatch.setattr("lakh.dashboard.server.across.run_command", searched)
    asyncio.run(_drive_plan(faulty_run, tmp_path))


async def _drive_plan(fake_run: Any, tmp_path: Path) -> None:
    runs = RunCollection(str(fake_run.run_dir))
    link = {"between": ["a", "b"], "distance_km": 40.0, "bandwidth_Tbps": 25.6}
    sites = {"sites": [{"name": name, "gpus": 64} for name in "ab"], "links": [link]}
    choices = {"models": ["llama3-8b", "llama3-70b"], "clusters": ["h100-pod", "laptop"], "sites": {"two": sites}}
    runner = web.AppRunner(application(runs, plan_choices=lambda: choices))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with browser(tmp_path / "profile") as tab:
            await tab.call("Page.navigate", url=f"http://127.0.0.1:{runner.addresses[0][1]}/")
            await tab.until("!document.getElementById('tools').hidden")
            await tab.ask("document.getElementById('to-plan').click()")
            await tab.until("document.querySelector('#pareto tbody tr') !== null")
            shown = await tab.ask("document.getElementById('plan-answer').innerText")
            for words in ("goodput", "memory of the fullest GPU", "lakh plan search --model llama3-8b", "--gpus 256"):
                assert words in shown
            assert await serious_violations(tab) == []
            move = "(box => { box.value = 1; box.dispatchEvent(new Event('input')); })"
            await tab.ask(f"{move}(document.querySelector('[type=range]'))")
            assert await tab.ask("document.getElementById('plan-gpus').value") == "2"
            await tab.until("document.getElementById('plan-answer').innerText.includes('--gpus 2 ')")
            await tab.ask("document.getElementById('across-search').click()")
            await tab.until("document.querySelector('#across progress') !== null")
            await tab.until("document.querySelector('.sites svg circle') !== null")
            shown = await tab.ask("document.getElementById('across').innerText")
            for words in (
                "−50",
                "40 km, 25.6 Tbit/s",
                "64 GPUs, 2 of 4 stages",
                "lakh plan across two --model llama3-8b",
            ):
                assert words in shown or words in await tab.ask("document.querySelector('.sites').textContent")
            assert await serious_violations(tab) == []
            await tab.ask("location.hash = ''")
            await tab.until("document.title.includes('step 120')")
            assert tab.complaints == []
    finally:
        await runner.cleanup()


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_hostile_run_is_shown_without_errors_on_every_page(tmp_path: Path) -> None:
    async def drive() -> None:
        write_hostile_run(tmp_path / "run", seed=1)
        runs = RunCollection(str(tmp_path / "run"))
        runs.read_all()
        saved = tmp_path / "page.html"
        saved.write_text(page(runs.data()))
        async with browser(tmp_path / "profile") as tab:
            await tab.call("Page.navigate", url=saved.as_uri())
            await tab.until("document.querySelector('nav.pages') !== null")
            for name in ("goodput", "fleet", ""):
                await tab.ask(f"location.hash = '#run/{name}'")
                await tab.until(f"view.page === '{name or 'overview'}' && document.querySelector('.card') !== null")
            assert await tab.ask("document.images.length") == 0
            assert await tab.ask("document.title") != "harmed"
            assert tab.complaints == []

    asyncio.run(drive())


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_any_runs_are_compared_by_an_address_of_their_own(new_fake_run: Any, tmp_path: Path) -> None:
    async def drive() -> None:
        for number in range(12):
            sweep = new_fake_run(tmp_path / "many" / f"sweep|{number}")
            sweep.now_s += number
            sweep.begin()
            sweep.steps(1, 5 + number)
            if number in (2, 4, 7):
                (sweep.run_dir / "tags.json").write_text(json.dumps({"tags": ["baseline", f"lr={number}"]}))
            if number % 2:
                sweep.event("run_ended", step=5 + number, reason="last step done", seconds=1.0)
        runner = web.AppRunner(application(RunCollection(str(tmp_path / "many"))))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with browser(tmp_path / "profile") as tab:
                await tab.call("Page.navigate", url=f"http://127.0.0.1:{runner.addresses[0][1]}/")
                await tab.until("document.querySelectorAll('svg.sparkline').length === 12")
                assert await serious_violations(tab) == []
                assert await tab.ask("document.getElementById('compare').disabled")
                choose = "((id, value) => { byId(id).value = value; byId(id).dispatchEvent(new Event('change')); })"
                names = "[...document.querySelectorAll('tbody tr a')].map(link => link.textContent)"
                await tab.ask(f"{choose}('tag', 'baseline')")
                assert await tab.ask(names) == ["sweep|7", "sweep|4", "sweep|2"]
                await tab.ask("document.getElementById('compare-shown').click()")
                await tab.until("view.chosen.length === 3 && document.body.innerText.includes('comparing 3 runs')")
                await tab.ask("location.hash = ''; view.tag = 'all'; view.search = 'sweep LR=4'; view.compared.clear()")
                await tab.until("view.chosen.length === 0 && document.getElementById('state') !== null")
                assert await tab.ask(names) == ["sweep|4"], "by words of name and tags"
                await tab.ask("document.querySelector('button.tag').click()")
                assert await tab.ask("view.tag") == "baseline"
                await tab.ask("view.tag = 'all'; view.search = ''; show()")
                await tab.ask(f"{choose}('state', 'done')")
                assert await tab.ask("document.querySelectorAll('tbody tr a').length") == 6
                for number in (1, 3, 11):  # the first two are not among the newest
                    await tab.ask(f"document.querySelector(`input[aria-label='compare sweep|{number}']`).click()")
                await tab.ask("document.getElementById('compare').click()")
                await tab.until("view.chosen.length === 3 && document.body.innerText.includes('comparing 3 runs')")
                labels = "[...new Set(charts[0].options.legend.map(one => one.label))].filter(one => one.includes('|'))"
                assert sorted(await tab.until(labels)) == ["sweep|1", "sweep|11", "sweep|3"]
                await tab.call("Page.reload")
                await tab.until("typeof view === 'object' && document.body.innerText.includes('comparing 3 runs')")
                assert tab.complaints == []
        finally:
            await runner.cleanup()

    asyncio.run(drive())
