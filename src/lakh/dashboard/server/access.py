"""Who may see the dashboard: on loopback, requests to loopback host names; elsewhere, clients with the token.

The host check stops DNS rebinding. A browser opens /?token=TOKEN once: the answer stores the token in a cookie and
redirects to the address without it, so that it does not stay in the history. Programs send `Authorization: Bearer
TOKEN`. /healthz needs no token and says nothing about the runs.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lakh.errors import UserError

__all__ = ["HEALTH_PATH", "LOOPBACK", "guard", "new_token", "read_token"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEALTH_PATH = "/healthz"
COOKIE = "lakh_dashboard_token"
MIN_TOKEN_CHARS = 16


def new_token() -> str:
    return secrets.token_urlsafe(24)


def read_token(path: str) -> str:
    """The token in a file, e.g. one that Kubernetes mounts from a secret."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--token-file {path}", f"cannot be read ({error})", "name a text file with the token"
        ) from None
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        found = f"is not a token of at least {MIN_TOKEN_CHARS} letters and digits"
        raise UserError(f"--token-file {path}", found, "make one with: openssl rand -hex 24")
    return token


def guard(token: str | None) -> Middleware:
    """A middleware that refuses requests without the token, or without a loopback host name if there is no token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is None:
            if _host_name(request.host) not in LOOPBACK:
                raise web.HTTPForbidden(text="this dashboard accepts only loopback host names")
            return await handler(request)
        if request.path == HEALTH_PATH:
            return await handler(request)
        if "token" in request.query and _is_equal(request.query["token"], token):
            query = [(key, value) for key, value in request.query.items() if key != "token"]
            clean = web.HTTPSeeOther(str(request.rel_url.with_query(query)))
            clean.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
            raise clean
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not any(_is_equal(found, token) for found in (bearer, request.cookies.get(COOKIE, ""))):
            text = "this dashboard needs its token: open the address that `lakh dashboard` printed"
            raise web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check


def _is_equal(found: str, token: str) -> bool:
    """In a time that does not depend on how much of it matches."""
    return hmac.compare_digest(found.encode(errors="replace"), token.encode())


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host
