"""mkdocs hooks: pages fetch nothing from elsewhere, and anchors are valid selectors, so that they work offline."""

from __future__ import annotations

from typing import Any

from markdown.extensions.toc import slugify

SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme's offline plugin links; docs/assets has a copy


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def anchor(heading: str, separator: str) -> str:
    """The id of a heading. The theme uses it as a CSS selector, which may not begin with a digit."""
    slug = slugify(heading, separator)
    return f"s{separator}{slug}" if slug[:1].isdigit() else slug


def on_post_page(output: str, page: Any, config: Any) -> str:
    depth = page.file.dest_uri.count("/")
    return output.replace(SHIM, "../" * depth + "assets/iframe-worker.js")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """404.html, whose links begin at the root of the site."""
    return output_content.replace(SHIM, "/assets/iframe-worker.js")
