"""The page, with all it needs inside: no build step, nothing fetched from elsewhere, works offline.

`page(None)` asks the server beside it for data; `page(data)` has its data inside and is a file that can be sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["as_json", "content_policy", "page"]


@cache
def _part(name: str) -> str:
    return files("lakh.room").joinpath("page", name).read_text(encoding="utf-8")


def page(data: dict[str, Any] | None) -> str:
    # "</" would end the script element; \u003c means the same to JSON, and "<!--" needs the same care.
    inside = "null" if data is None else as_json(data).replace("<", "\\u003c")
    html = _part("room.html").replace("/*STYLE*/", _part("room.css")).replace("/*SCRIPT*/", _part("room.js"))
    return html.replace("/*DATA*/", inside)


def content_policy() -> str:
    """What a browser lets the page do: run our script, ask our server, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_part("room.js").encode()).digest()).decode()
    ours = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return f"default-src 'none'; {ours}"


def as_json(data: Any) -> str:
    return json.dumps(_finite(data), separators=(",", ":"))


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
