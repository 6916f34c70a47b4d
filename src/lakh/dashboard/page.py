"""The dashboard page as one self-contained HTML document: no build step, no external resources.

`page(None)` polls its server for data; `page(data)` embeds the data and works as a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["as_json", "content_policy", "page"]


@cache
def _part(name: str) -> str:
    return files("lakh.dashboard").joinpath("page", name).read_text(encoding="utf-8")


def _uplot() -> str:
    """uPlot with its licence, which every copy must contain."""
    return f"/*! {_part('uplot/LICENSE')} */\n{_part('uplot/uPlot.iife.min.js')}"


def _script() -> str:
    return "".join(_part(f"{name}.js") for name in ("charts", "run_pages", "plan_page", "dashboard"))


def page(data: dict[str, Any] | None) -> str:
    # "</" would end the script element; \u003c means the same to JSON, and "<!--" needs the same care.
    embedded = "null" if data is None else as_json(data).replace("<", "\\u003c")
    html = (
        _part("dashboard.html")
        .replace("/*STYLE*/", _part("uplot/uPlot.min.css") + _part("dashboard.css"))
        .replace("/*UPLOT*/", _uplot())
        .replace("/*SCRIPT*/", _script())
    )
    return html.replace("/*DATA*/", embedded)


def content_policy() -> str:
    """The Content-Security-Policy: run our scripts, query our server, nothing else."""
    scripts = (_uplot(), _script())
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def as_json(data: Any) -> str:
    """JSON has no NaN or infinity: they become null."""
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":"))
