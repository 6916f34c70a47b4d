"""A lakh command as a child process, for pages whose answers other packages compute: the dashboard imports none of
them, and a request that is no longer wanted is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["run_command"]

TIMEOUT_S = 60.0
LAKH = (sys.executable, "-m", "lakh")


async def run_command(*words: str, command: Sequence[str] = LAKH, timeout_s: float | None = None) -> dict[str, Any]:
    """The JSON document of a lakh command, or {"error": text}."""
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    process = await asyncio.create_subprocess_exec(
        *command, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return {"error": f"lakh {' '.join(words[:2])} took over {limit_s:g} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    lines = output.decode(errors="replace").splitlines()
    try:
        document = json.loads(lines[-1]) if lines else {}
    except ValueError:
        document = {}
    if not document or not isinstance(document, dict):
        return {"error": f"lakh {' '.join(words[:2])} failed with code {process.returncode}"}
    if isinstance(problem := document.get("error"), dict):
        return {"error": f"{problem.get('where')}: {problem.get('found')}; {problem.get('todo')}"}
    return document
