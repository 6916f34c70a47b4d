"""Take the pictures of docs/how-to/dashboard.md.

    python -m scripts.dashboard_screenshots RUN_DIR LARGE_RUN_DIR [FOLDER]

RUN_DIR is a finished run, e.g. demo/run of `lakh demo`; LARGE_RUN_DIR one of bench/dashboard/synthetic_events.py, for
the fleet page. The page of runs shows the folder that holds it. With FOLDER, every page is pictured from top to
end in light, dark and at the width of a phone, to look for faults; without it, docs/assets is renewed. Needs Chromium.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from tests.browser import Tab, browser

from lakh.cli.dashboard import BACK_TO_RUNS, plan_choices
from lakh.dashboard.runs import RunCollection
from lakh.dashboard.server import application
from lakh.dashboard.server.playground import Playground
from lakh.server.api import playground as playground_page

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
PAINT_S = 0.5
CHARTS = "document.querySelectorAll('.chart canvas').length > 3"


@dataclass(frozen=True)
class Picture:
    name: str
    """Of the file: dashboard-NAME.png; that of the overview is dashboard.png."""
    page: str
    """After the # of the address; {run} is the name of the run. A path where it begins with /."""
    is_ready: str
    """What must hold before the picture is taken."""
    height: int = 720
    clicked: str = ""
    """A selector of what is clicked first."""
    is_in_docs: bool = True


OF_RUN = (
    Picture("overview", "{run}", CHARTS, 800),
    Picture("goodput", "{run}/goodput", "document.querySelector('#interruptions, .empty') !== null"),
    Picture("data", "{run}/data", "!document.body.innerText.includes('reading …')", 800),
    Picture("evaluations", "{run}/evaluations", "view.samples !== null", 720, "button.samples"),
    Picture("plan", "/plan", "document.querySelector('#pareto tbody tr') !== null", 800),
    Picture("playground", "/playground/", "document.querySelector('textarea') !== null", is_in_docs=False),
)
OF_RUNS = (Picture("runs", "", CHARTS, 800),)
OF_LARGE_RUN = (Picture("fleet", "{run}/fleet", "document.getElementById('ranks') !== null"),)
SEARCHED = (Picture("across", "/plan", "document.querySelector('.sites svg') !== null", 800, "#across-search"),)
LOOKS = {"light": (1200, "light"), "dark": (1200, "dark"), "phone": (390, "light")}


@contextlib.asynccontextmanager
async def pages(folder: str) -> AsyncIterator[tuple[Tab, str]]:
    """A tab, and the address of the dashboard of a folder."""
    runs = RunCollection(folder)
    runs.read_all()
    playground = Playground(playground_page.page(BACK_TO_RUNS), playground_page.HEADERS, None)
    runner = web.AppRunner(application(runs, plan_choices=plan_choices, playground=playground))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with browser(Path(profile)) as tab:
            yield tab, f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def take(folder: str, run: str, pictures: tuple[Picture, ...], everything: Path | None) -> None:
    async with pages(folder) as (tab, base):
        for picture in pictures:
            await tab.call("Page.navigate", url="about:blank")
            page = picture.page.format(run=quote(run, safe=""))
            is_path = page.startswith("/") and page.endswith("/")
            await tab.call("Page.navigate", url=base.rstrip("/") + page if is_path else f"{base}#{page}")
            if everything is None and not picture.is_in_docs:
                continue
            if picture.clicked:
                await tab.until(f"document.querySelector('{picture.clicked}') !== null")
                await tab.ask(f"document.querySelector('{picture.clicked}').click()")
            await tab.until(picture.is_ready)
            if picture.name == "across":
                await tab.ask("document.getElementById('across').scrollIntoView()")
            for look, (width, theme) in LOOKS.items():
                in_docs = look == "light" or picture.name == "overview"
                if everything is None and not in_docs:
                    continue
                height = picture.height if look != "phone" else 844
                media = {"name": "prefers-color-scheme", "value": theme}
                metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": look == "phone"}
                await tab.call("Emulation.setEmulatedMedia", features=[media])
                await tab.call("Emulation.setDeviceMetricsOverride", **metrics)
                await asyncio.sleep(PAINT_S)
                name = "-".join(word for word in ("dashboard", picture.name, look) if word not in ("overview", "light"))
                if everything is None:
                    path, whole = ASSETS / f"{name}.png", {}
                else:
                    path, whole = everything / f"{name}.png", {"captureBeyondViewport": True}
                    tall = await tab.ask("document.documentElement.scrollHeight")
                    whole["clip"] = {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}  # type: ignore[assignment]
                shot = await tab.call("Page.captureScreenshot", format="png", **whole)
                path.write_bytes(base64.b64decode(shot["data"]))
                sys.stdout.write(f"{path}\n")
        complaints = [text for text in tab.complaints if "playground/ready" not in text]  # which has no server here
        if complaints:
            sys.exit(f"the page complains: {complaints}")


if __name__ == "__main__":
    small, large = (Path(word) for word in sys.argv[1:3])
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(str(small), small.name, OF_RUN, out))
    asyncio.run(take(str(large.parent), large.name, OF_RUNS, out))
    asyncio.run(take(str(large), large.name, OF_LARGE_RUN, out))
    asyncio.run(take(str(small), small.name, SEARCHED, out))  # last: the search takes a minute
