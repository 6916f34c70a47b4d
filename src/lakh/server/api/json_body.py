"""The JSON body of an HTTP request."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from lakh.server.request import RequestError

__all__ = ["read_json"]

BODY_TIMEOUT_S = 30.0


async def read_json(http: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):  # `wait_for` would create a task (Python 3.11)
            body = await http.read()
    except TimeoutError:
        raise RequestError(None, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    except web.RequestPayloadError as error:  # a wrong content-encoding or a malformed chunk
        raise RequestError(None, f"the body cannot be read ({error})"[:200]) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(None, "the body is not JSON in UTF-8") from None
