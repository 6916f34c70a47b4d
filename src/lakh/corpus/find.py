"""One document of a corpus, kept or dropped, by its id, the beginning of its id, or repo/path."""

from __future__ import annotations

import difflib
import re
from typing import Any

import pyarrow.compute as pc

from lakh.corpus.document import Document
from lakh.corpus.report import read_report
from lakh.corpus.shards import check_shard, read_documents, read_rows
from lakh.errors import UserError

__all__ = ["find"]

SHOWN_MATCHES = 5
MIN_PREFIX = 4
PLACE = ["id", "repo", "path"]


def find(url: str, wanted: str) -> Document | dict[str, str]:
    """A kept document, or {id, repo, path, reason, detail} of a dropped one."""
    report = read_report(url)
    kept = [row for batch in read_documents(url, PLACE) for row in _matches(batch, wanted)]
    columns = [*PLACE, "reason", "detail"]
    dropped_file = check_shard(url, report.dropped_file)
    dropped = [row for batch in read_rows(dropped_file, columns) for row in _matches(batch, wanted)]
    found = kept + dropped
    if not found:
        raise UserError(wanted, f"no such document in {url}", _suggestion(url, wanted))
    if len(found) > 1:
        some = ", ".join(f"{row['id'][:12]} ({row['repo']}/{row['path']})" for row in found[:SHOWN_MATCHES])
        raise UserError(wanted, f"means {len(found)} documents: {some}", "give more of the id")
    return _load(url, kept[0]["id"]) if kept else dropped[0]


def _matches(batch: Any, wanted: str) -> list[dict[str, Any]]:
    places = pc.binary_join_element_wise(batch.column("repo"), batch.column("path"), "/")
    chosen = pc.equal(places, wanted)
    if len(wanted) >= MIN_PREFIX and re.fullmatch(r"[0-9a-f]+", wanted):
        chosen = pc.or_(chosen, pc.starts_with(batch.column("id"), wanted))
    rows: list[dict[str, Any]] = batch.filter(chosen).to_pylist()
    return rows


def _load(url: str, identity: str) -> Document:
    for batch in read_documents(url):
        rows = batch.filter(pc.equal(batch.column("id"), identity)).to_pylist()
        if rows:
            return Document(**rows[0])
    raise AssertionError("it was there a moment ago")


def _suggestion(url: str, wanted: str) -> str:
    places = [f"{row['repo']}/{row['path']}" for batch in read_documents(url, PLACE) for row in batch.to_pylist()]
    near = difflib.get_close_matches(wanted, places, n=1) or [place for place in places if place.endswith(wanted)]
    return f"did you mean {near[0]}?" if near else "give an id (4 or more digits of it) or repo/path"
