"""Duplicates and dropped documents of a run's corpus, over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from lakh.dashboard.server.corpus import CorpusService

FAKE = """
import json, pathlib, sys
log = pathlib.Path(sys.argv[0]).with_suffix(".log")
log.open("a").write(json.dumps(sys.argv[1:]) + "\\n")
if "damaged" in sys.argv[-1]:
    print(json.dumps({"error": {"where": "w", "found": "f", "todo": "t"}}))
else:
    cluster = {"place": "a/<b>", "exact": 3, "near": "many", "members": ["x" * 1000] * 50}
    dropped = {"licence": [{"place": "p", "detail": "d"}, 3]}
    print(json.dumps({"duplicate_clusters": [cluster] * 50 + [3], "samples": {"dropped": dropped}}))
"""


def test_the_report_is_asked_once_for_each_corpus_and_bounded(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    paths = {"one": str(tmp_path / "corpus"), "other": str(tmp_path / "damaged")}

    async def drive() -> None:
        app = web.Application()
        app.router.add_get("/corpus.json", CorpusService(paths.get, [sys.executable, str(fake)]).handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}/corpus.json?run="
        try:
            async with aiohttp.ClientSession() as session:

                async def ask(name: str) -> tuple[int, Any]:
                    async with session.get(base + name) as answer:
                        return answer.status, await answer.json(content_type=None) if answer.status == 200 else None

                status, found = await ask("one")
                assert status == 200
                assert len(found["clusters"]) == 12
                first = found["clusters"][0]
                assert (first["place"], first["exact"], first["near"]) == ("a/<b>", 3, 0)
                assert (len(first["members"]), len(first["members"][0])) == (12, 400)
                assert found["dropped"] == {"licence": [{"place": "p", "detail": "d"}]}
                assert (await ask("one"))[1] == found
                assert (await ask("other"))[1] == {"error": "w: f; t"}
                assert (await ask("../../etc"))[0] == 404
        finally:
            await runner.cleanup()

    asyncio.run(drive())
    calls = [json.loads(line) for line in fake.with_suffix(".log").read_text().splitlines()]
    assert [call[-1] for call in calls] == [paths["one"], paths["other"]]
    assert calls[0][:-1] == ["corpus", "report", "--samples", "5", "--json", "--"]
