"""Open what a listing names: plain files, and containers that hold many documents.

`open_listed` yields `RawDocument` records. A container is read as a stream, member by member, by the worker of its
split.

    file                one file                         docs       one file of documentation (Markdown, RST, HTML)
    archive             archives.py                      jsonl, parquet, synthetic-jsonl, synthetic-parquet   records.py
    posts               posts.py

Content that cannot be read gives a RawDocument with a reason, never an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lakh.corpus.sources.archives import below, evidence_of, members, stem_of
from lakh.corpus.sources.listing import RawDocument, ReadPredicate
from lakh.corpus.sources.markup import to_markdown
from lakh.corpus.sources.notebooks import is_notebook, size_limit, to_script
from lakh.corpus.sources.posts import read_posts
from lakh.corpus.sources.records import read_jsonl, read_parquet

__all__ = ["DOCUMENTATION", "open_listed"]

DOCUMENTATION = frozenset({"markdown", "restructuredtext", "html"})
HTML_ENDINGS = (".html", ".htm")


def open_listed(listed: Mapping[str, Any], max_file_bytes: int, wanted: ReadPredicate) -> Iterator[RawDocument]:
    """The documents of one listed row."""
    for raw in _documents(listed, max_file_bytes, wanted):
        if raw.content is not None and is_notebook(raw.path):
            to_script(raw)
        yield raw


def _documents(listed: Mapping[str, Any], max_file_bytes: int, wanted: ReadPredicate) -> Iterator[RawDocument]:
    kind, repo = listed["kind"], listed["repo"]
    url = os.fsdecode(listed["location"])
    if listed["reason"] or kind in ("file", "docs"):
        yield _file(listed, max_file_bytes, wanted)
    elif kind == "archive":
        yield from _archive(url, listed, max_file_bytes, wanted)
    elif kind == "posts":
        yield from read_posts(url, repo)
    else:
        synthetic = kind.startswith("synthetic")
        if kind.endswith("jsonl"):
            records = read_jsonl(url, listed["part"], repo, synthetic=synthetic)
        else:
            records = read_parquet(url, listed["part"], repo, synthetic=synthetic)
        for raw in records:
            raw.licence = raw.licence or listed["licence"]
            yield raw


def _file(listed: Mapping[str, Any], max_file_bytes: int, wanted: ReadPredicate) -> RawDocument:
    same = ("repo", "path", "size_bytes", "licence", "licence_evidence", "reason", "detail")
    raw = RawDocument(**{name: listed[name] for name in same}, documentation=listed["kind"] == "docs")
    if raw.reason or (not raw.documentation and not wanted(raw.path, raw.size_bytes)):
        return raw
    try:
        with Path(os.fsdecode(listed["location"])).open("rb") as file:
            raw.content = file.read(size_limit(raw.path, max_file_bytes) + 1)
    except OSError as error:
        raw.reason, raw.detail = "unreadable", error.strerror or str(error)
    else:
        if raw.documentation and raw.path.lower().endswith(HTML_ENDINGS) and len(raw.content) <= max_file_bytes:
            raw.content = to_markdown(raw.content.decode("utf-8", "replace")).encode()
    return raw


def _archive(url: str, listed: Mapping[str, Any], max_file_bytes: int, wanted: ReadPredicate) -> Iterator[RawDocument]:
    found = evidence_of(url).classify()
    top, part = stem_of(url.rpartition("/")[2]), listed["part"]
    for raw in members(url, max_file_bytes, wanted, listed["repo"], part):
        raw.path = below(raw.path, top) or (f"{top}:{part}" if part else top)
        raw.licence, raw.licence_evidence = listed["licence"] or found.expression, found.evidence
        yield raw
