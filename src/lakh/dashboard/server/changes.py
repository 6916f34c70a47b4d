"""Server-sent events: tell the page when there is something new, and every few seconds that the server lives.

Each message holds the version of what is shown; the page then asks for data.json, which is a 304 if it has it already.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

__all__ = ["ChangeStream"]

HEARTBEAT_S = 5.0
MAX_STREAMS = 64
RETRY_MS = 2_000
"""When a browser connects again after the server was gone."""


class ChangeStream:
    def __init__(self) -> None:
        self._version = ""
        self._streams = 0
        self._closing = False
        self._changed = asyncio.Condition()

    async def publish(self, version: str) -> None:
        """Tell every open page if `version` is new."""
        if version != self._version:
            self._version = version
            async with self._changed:
                self._changed.notify_all()

    async def close(self, _: web.Application) -> None:
        """End the streams, so that the server can stop."""
        self._closing = True
        async with self._changed:
            self._changed.notify_all()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """GET /events"""
        if self._streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_STREAMS} pages are open; this one asks every few seconds")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        self._streams += 1
        try:
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            while not self._closing:
                sent = self._version
                await response.write(f"data: {sent}\n\n".encode())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S), self._changed:
                        while self._version == sent and not self._closing:
                            await self._changed.wait()
        except ConnectionError:  # the page was closed
            pass
        finally:
            self._streams -= 1
        return response
