"""mkdocs hooks: the pages fetch nothing from elsewhere, so that search works offline, from a folder of files too."""

from __future__ import annotations

from typing import Any

SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme's offline plugin links; docs/assets has a copy


def on_post_page(output: str, page: Any, config: Any) -> str:
    depth = page.file.dest_uri.count("/")
    return output.replace(SHIM, "../" * depth + "assets/iframe-worker.js")
