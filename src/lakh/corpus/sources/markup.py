"""HTML to Markdown, as far as documentation needs it: headings, paragraphs, lists, link texts, code.

Uses the standard library's parser, which accepts any input; scripts, styles and navigation are skipped.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

__all__ = ["to_markdown"]

BLOCKS = {
    "p", "div", "section", "article", "table", "tr", "ul", "ol", "blockquote", "dl", "dt", "dd", "main", "br", "hr",
}  # fmt: skip
SKIPPED = {"script", "style", "nav", "head", "header", "footer", "noscript", "template", "svg", "form", "button"}
HEADING = re.compile(r"h([1-6])")


class _MarkdownConverter(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped_depth = self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self._skipped_depth += 1
        elif self._skipped_depth:
            return
        elif tag == "pre":
            self._pre += 1
            self.parts.append("\n\n```\n")
        elif tag == "code" and not self._pre:
            self.parts.append("`")
        elif tag == "li":
            self.parts.append("\n- ")
        elif found := HEADING.fullmatch(tag):
            self.parts.append("\n\n" + "#" * int(found[1]) + " ")
        elif tag in BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipped_depth = max(0, self._skipped_depth - 1)
        elif self._skipped_depth:
            return
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
            self.parts.append("\n```\n\n")
        elif tag == "code" and not self._pre:
            self.parts.append("`")
        elif HEADING.fullmatch(tag) or tag in BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped_depth:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def to_markdown(html: str) -> str:
    """The readable part of an HTML page or fragment."""
    parser = _MarkdownConverter()
    parser.feed(html)
    parser.close()
    lines = "".join(parser.parts).split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
