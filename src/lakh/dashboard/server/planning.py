"""The plan page: GET /plan.json answers with the best layouts of a model on a cluster, their cost, and goodput.

`lakh plan search` and `lakh plan goodput` compute it, one request at a time.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from lakh.dashboard.server.lakh_command import LAKH, run_command

__all__ = ["PlanService", "checked_number"]

MAX_PARETO_ROWS = 40
GOODPUT_RUNS = 1_000
LIMITS = {"gpus": 200_000, "batch": 10_000_000, "sequence": 10_000_000, "tokens": 1e16}
ROW_KEYS = ("gpus", "name", "step_s", "usd_per_step", "memory_bytes", "run_days", "run_usd", "error_bar")
Choices = Mapping[str, Any]


def checked_number(query: Mapping[str, str], name: str) -> float:
    """One of the numbers of LIMITS; raises for anything else."""
    text, most = query.get(name, ""), LIMITS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= most:
        raise web.HTTPBadRequest(text=f"{name}={text[:80]}: choose a number from 1 to {most:g}")
    return value


class PlanService:
    """`choices` returns the names of models and clusters that a request may use."""

    def __init__(self, choices: Callable[[], Choices], command: Sequence[str] = LAKH) -> None:
        self._choices, self._command = choices, command
        self._one_at_a_time = asyncio.Semaphore(1)
        self._known: Choices | None = None

    async def names(self, request: web.Request) -> web.Response:
        """GET /plan-choices.json"""
        return web.json_response(await self._known_names())

    async def handle(self, request: web.Request) -> web.Response:
        """GET /plan.json?model=&cluster=&gpus=&sequence=&batch=&tokens="""
        options = self._options(request.query, await self._known_names())
        async with self._one_at_a_time:
            return web.json_response(await self._plan(options))

    async def _known_names(self) -> Choices:
        if self._known is None:
            self._known = await asyncio.to_thread(self._choices)
        return self._known

    def _options(self, query: Mapping[str, str], known: Choices) -> list[str]:
        words = []
        for name in ("model", "cluster"):
            if query.get(name) not in known[f"{name}s"]:  # only names: no paths from a web page
                raise web.HTTPBadRequest(text=f"{name}={query.get(name, '')[:80]}: no such {name}")
            words += [f"--{name}", query[name]]
        for name in LIMITS:
            if not query.get(name) and name != "gpus":
                continue
            value = checked_number(query, name)
            words += [f"--{name}", f"{value:g}" if name == "tokens" else str(int(value))]
        return words

    async def _plan(self, options: list[str]) -> dict[str, Any]:
        found = await run_command("plan", "search", *options, "--json", command=self._command)
        command = shlex.join(["lakh", "plan", "search", *options])
        if "error" in found:
            return {"command": command, "error": found["error"]}
        best = found.get("best")
        rows = [{key: row[key] for key in ROW_KEYS if key in row} for row in found.get("pareto", [])[:MAX_PARETO_ROWS]]
        answer = {key: found.get(key) for key in ("why", "hint", "searched", "refused")}
        answer |= {"command": command, "pareto": rows, "best": None, "goodput": None}
        if best:
            days = str(best.get("run_days") or 30.0)
            answer["best"] = {key: best[key] for key in ROW_KEYS if key in best}
            goodput = ["--gpus", str(best["gpus"]), "--days", days, "--runs", str(GOODPUT_RUNS)]
            answer["goodput"] = await run_command("plan", "goodput", *goodput, "--json", command=self._command)
        return answer
