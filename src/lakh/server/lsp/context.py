"""What a completion request sends: the text around the cursor, and neighbouring files.

Neighbours are the other open files of the same language, around their last edit, the most recently edited last (the
service keeps the last ones if not all fit), after files of the same folder that are not open, the newest last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lakh.server.lsp.documents import OpenFile, OpenFiles, path_of
from lakh.server.prompts.fim import cut_before

__all__ = ["request_body"]

PREFIX_CHARS, SUFFIX_CHARS = 12_000, 4_000
STEP_CHARS = 1_024  # the prompt's start moves in such steps, so the service's prefix cache stays useful
NEIGHBOUR_CHARS = 2_000
MAX_OPEN, MAX_ON_DISK = 6, 3
MAX_FILE_BYTES = 1 << 18


def request_body(
    documents: OpenFiles, document: OpenFile, at: int, *, max_tokens: int, automatic: bool
) -> dict[str, Any]:
    """The body of POST /v1/completions for the cursor at offset `at`. An automatic suggestion ends at a blank line."""
    path = path_of(document.uri)
    extra = [*_on_disk(documents, path), *_open_files(documents, document)]
    return {
        "prompt": cut_before(document.text[:at], PREFIX_CHARS, STEP_CHARS),
        "suffix": document.text[at : at + SUFFIX_CHARS],
        "order": "psm",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stop_rule": "block" if automatic else "dedent",
        "supersede": document.uri[:1000],
        **({"input_extra": extra} if extra else {}),
    }


def _open_files(documents: OpenFiles, current: OpenFile) -> list[dict[str, str]]:
    others = [
        one for one in documents.by_uri.values() if one is not current and one.language == current.language and one.text
    ]
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


def _on_disk(documents: OpenFiles, path: str | None) -> list[dict[str, str]]:
    if path is None:
        return []
    here = Path(path)
    known = {path_of(uri) for uri in documents.by_uri}
    found = []
    try:
        for file in here.parent.iterdir():
            if file.suffix == here.suffix and str(file) not in known and file.is_file():
                status = file.stat()
                if status.st_size <= MAX_FILE_BYTES:
                    found.append((status.st_mtime, str(file)))
    except OSError:
        return []
    files = []
    for _, name in sorted(found)[-MAX_ON_DISK:]:
        try:
            text = Path(name).read_text(encoding="utf-8")[:NEIGHBOUR_CHARS]
        except (OSError, UnicodeDecodeError):
            continue
        files.append({"filename": _name(name), "text": text})
    return files


def _name(path: str) -> str:
    """The end of a path, which says what a file is without naming the user's folders."""
    return "/".join(path.split("/")[-2:])
