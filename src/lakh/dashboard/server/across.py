"""GET /across.json: the best way to train a model on several sites, with a map of them.

`lakh plan across` searches for half a minute or longer, so an answer is either the result or how long it has searched;
the page asks again. One search runs at a time: another question ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from lakh.dashboard.server.lakh_command import LAKH, run_command
from lakh.dashboard.server.planning import checked_number
from lakh.dashboard.server.site_map import site_map

__all__ = ["AcrossService"]

TIMEOUT_S = 300.0
MAX_KEPT = 16
LAYOUT_KEYS = ("tp", "pp", "cp", "ep", "schedule", "routing", "transport", "qps", "extra_wavelengths")
ROW_KEYS = ("step_s", "usd_per_step", "gpus", "placement", "crossing", *LAYOUT_KEYS)


class AcrossService:
    """`choices` returns the models, and under "sites" the descriptions of sites by name."""

    def __init__(
        self,
        choices: Callable[[], Mapping[str, Any]],
        command: Sequence[str] = LAKH,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._choices, self._command, self._timeout_s = choices, command, timeout_s
        self._known: Mapping[str, Any] | None = None
        self._kept: dict[tuple[str, ...], dict[str, Any]] = {}
        self._asked: tuple[str, ...] | None = None
        self._task: asyncio.Task[None] | None = None
        self._began_s = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        """GET /across.json?sites=&model=&batch=&sequence="""
        if self._known is None:
            self._known = await asyncio.to_thread(self._choices)
        words = self._words(request.query, self._known)
        if words in self._kept:
            answer = self._kept[words]
            if "error" in answer:  # told once; who asks again wants another search
                del self._kept[words]
            return web.json_response(answer)
        if words != self._asked:
            await self.stop()
            self._asked, self._began_s = words, time.monotonic()
            self._task = asyncio.create_task(self._search(words, self._known["sites"][words[0]]))
        searched = {"seconds": time.monotonic() - self._began_s, "limit_s": self._timeout_s}
        return web.json_response({"command": _command(words), "searching": searched})

    async def stop(self, _: web.Application | None = None) -> None:
        """End the search that runs."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._task, self._asked = None, None

    def _words(self, query: Mapping[str, str], known: Mapping[str, Any]) -> tuple[str, ...]:
        for name, names in (("sites", known["sites"]), ("model", known["models"])):
            if query.get(name) not in names:  # only names: no paths from a web page
                raise web.HTTPBadRequest(text=f"{name}={query.get(name, '')[:80]}: not known")
        words = [query["sites"], "--model", query["model"]]
        for name in ("batch", "sequence"):
            if query.get(name):
                words += [f"--{name}", str(int(checked_number(query, name)))]
        return tuple(words)

    async def _search(self, words: tuple[str, ...], sites: Mapping[str, Any]) -> None:
        found = await run_command("plan", "across", *words, "--json", command=self._command, timeout_s=self._timeout_s)
        answer = _answer(found, sites) | {"command": _command(words)}
        self._kept = dict([*self._kept.items()][1 - MAX_KEPT :]) | {words: answer}
        self._asked = self._task = None


def _command(words: Sequence[str]) -> str:
    return shlex.join(["lakh", "plan", "across", *words])


def _answer(found: Mapping[str, Any], sites: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {"error": found["error"]}
    best, default = found["best"], found["baselines"]["production"]
    rows = {"best": best, "best, links as they are": found["best_as_built"], "production default": default}
    return {
        "rows": {name: {key: row[key] for key in ROW_KEYS if key in row} for name, row in rows.items()},
        "gain": found["gain"]["production"],
        "gain_as_built": found["gain_as_built"]["production"],
        **{key: found[key] for key in ("why", "searched", "seconds", "notes")},
        "map": site_map(sites, best["groups"]),
        "default_map": site_map(sites, default["groups"]),
    }
