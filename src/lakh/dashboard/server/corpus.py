"""GET /corpus.json?run=NAME: groups of duplicates and dropped documents of the corpus that a run was trained on.

`lakh corpus report` reads them from the corpus; the last answers are kept until the corpus is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from lakh.dashboard.server.lakh_command import LAKH, run_command
from lakh.storage import MANIFEST

__all__ = ["CorpusService"]

MAX_KEPT = 16
MAX_REASONS = 40
MAX_ROWS = 12
MAX_TEXT = 400
SAMPLES = "5"


class CorpusService:
    """`path_of` returns the folder of the corpus of a run, by the run's name; None if it is not known."""

    def __init__(self, path_of: Callable[[str], str | None], command: Sequence[str] = LAKH) -> None:
        self._path_of, self._command = path_of, command
        self._one_at_a_time = asyncio.Semaphore(1)
        self._kept: dict[tuple[str, int], dict[str, Any]] = {}

    async def handle(self, request: web.Request) -> web.Response:
        path = await asyncio.to_thread(self._path_of, request.query.get("run", ""))
        if path is None:
            raise web.HTTPNotFound(text="no corpus of such a run")
        async with self._one_at_a_time:
            key = path, await asyncio.to_thread(_written_ns, path)
            if key not in self._kept:
                words = ("corpus", "report", "--samples", SAMPLES, "--json", "--", path)
                found = await run_command(*words, command=self._command)
                if "error" in found:
                    return web.json_response(found)
                self._kept = dict([*self._kept.items()][1 - MAX_KEPT :]) | {key: _shown(found)}
        return web.json_response(self._kept[key])


def _written_ns(path: str) -> int:
    try:
        return (Path(path) / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _shown(report: dict[str, Any]) -> dict[str, Any]:
    clusters = [
        {
            "place": _text(row.get("place")),
            "exact": _count(row.get("exact")),
            "near": _count(row.get("near")),
            "members": [_text(place) for place in _list(row.get("members"))[:MAX_ROWS]],
        }
        for row in _list(report.get("duplicate_clusters"))[:MAX_ROWS]
        if isinstance(row, dict)
    ]
    samples = report.get("samples")
    dropped = samples.get("dropped") if isinstance(samples, dict) else None
    rows = list(dropped.items())[:MAX_REASONS] if isinstance(dropped, dict) else []
    keys = ("place", "detail")
    shown = {
        _text(reason): [{key: _text(one.get(key)) for key in keys} for one in _list(found) if isinstance(one, dict)]
        for reason, found in rows
    }
    return {"clusters": clusters, "dropped": shown}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:MAX_TEXT]


def _count(value: Any) -> int:
    return value if type(value) is int else 0
