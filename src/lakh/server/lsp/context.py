"""What a completion request sends: the text around the cursor, and what the rest of the repository says about it.

Other open files of the same language come first, around their last edit, the most recently edited last; then outlines
of what the file imports and of related code (lakh.server.retrieval). The service keeps the last ones if not all fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lakh.server.lsp.documents import OpenFile, OpenFiles, path_of
from lakh.server.prompts.fim import cut_before
from lakh.server.retrieval.snippets import related_snippets

__all__ = ["request_body"]

PREFIX_CHARS, SUFFIX_CHARS = 12_000, 4_000
STEP_CHARS = 1_024  # the prompt's start moves in such steps, so the service's prefix cache stays useful
NEIGHBOUR_CHARS = 2_000
MAX_OPEN = 6


def request_body(
    documents: OpenFiles, document: OpenFile, at: int, *, max_tokens: int, automatic: bool
) -> dict[str, Any]:
    """The body of POST /v1/completions for the cursor at offset `at`. An automatic suggestion ends at a blank line."""
    extra = [*_open_files(documents, document), *_related(documents, document, at)]
    after = document.text[at : at + SUFFIX_CHARS]
    return {
        "prompt": cut_before(document.text[:at], PREFIX_CHARS, STEP_CHARS),
        # The end of a file needs no tokens for filling in, which not every model has.
        "suffix": after if after.strip() else "",
        "order": "psm",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stop_rule": "block" if automatic else "dedent",
        "supersede": document.uri[:1000],
        "user": documents.editor,
        **({"input_extra": extra} if extra else {}),
    }


def _open_files(documents: OpenFiles, current: OpenFile) -> list[dict[str, str]]:
    open_files = list(documents.by_uri.values())
    others = [one for one in open_files if one is not current and one.language == current.language and one.text]
    recent = sorted(others, key=lambda one: one.edited)[-MAX_OPEN:]
    return [{"filename": _name(path_of(one.uri) or one.uri), "text": _around(one)} for one in recent]


def _around(document: OpenFile) -> str:
    """Whole lines around the last edit."""
    if len(document.text) <= NEIGHBOUR_CHARS:
        return document.text
    start = max(0, min(document.edited_at, len(document.text)) - NEIGHBOUR_CHARS // 2)
    start = document.text.rfind("\n", 0, start) + 1
    end = document.text.rfind("\n", start, start + NEIGHBOUR_CHARS)
    return document.text[start : end + 1 if end > start else start + NEIGHBOUR_CHARS]


def _related(documents: OpenFiles, current: OpenFile, at: int) -> list[dict[str, str]]:
    path = path_of(current.uri)
    if path is None:
        return []
    open_files = list(documents.by_uri.values())
    others = sorted((one for one in open_files if one is not current), key=lambda one: -one.edited)
    recent = [Path(name) for one in others if (name := path_of(one.uri))]
    found = related_snippets(
        documents.repository_of(Path(path)), Path(path), current.text[:at], current.text[at:], recent=recent
    )
    return [{"filename": file.name, "text": file.text} for file in found]


def _name(path: str) -> str:
    """The end of a path, which says what a file is without naming the user's folders."""
    return "/".join(path.split("/")[-2:])
