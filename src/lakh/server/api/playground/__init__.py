"""The playground: a page at `GET /` to try completions in a browser. `lakh dashboard` shows the same page.

One self-contained HTML document; the browser may run its script, use its style and query this server, nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

__all__ = ["HEADERS", "page"]


@cache
def _part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


@cache
def page(navigation: str = "") -> str:
    """`navigation`: trusted HTML for the header, where the page is part of another site."""
    html = _part("playground.html").replace("<!--NAVIGATION-->", navigation)
    return html.replace("/*STYLE*/", _part("playground.css")).replace("/*SCRIPT*/", _part("playground.js"))


def _content_policy() -> str:
    def source(name: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(_part(name).encode()).digest()).decode()}'"

    own = f"script-src {source('playground.js')}; style-src {source('playground.css')}; connect-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


HEADERS = {
    "Content-Security-Policy": _content_policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
