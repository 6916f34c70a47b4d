"""Find one document of a corpus, kept or dropped, by id, prefix of an id, or repo/path; and list dropped examples
and the largest groups of duplicates.

`find_document` returns the history of a document: its origin, what was decided about it, and which copies it replaced.
Reads only the needed columns of the corpus; memory is the result.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import REASONS, Document
from lakh.corpus.reports.report import read_report
from lakh.corpus.shards import check_shard, read_documents, read_rows
from lakh.errors import UserError

__all__ = ["DocumentHistory", "DuplicateCluster", "dropped_examples", "duplicate_clusters", "find_document"]

SHOWN_MATCHES = 5
MIN_PREFIX = 4
PLACE = ["id", "repo", "path"]
LIKE = ("exact-duplicate", "near-duplicate")
MAX_LOST = 20
MAX_CLUSTERS = 12
MAX_MEMBERS = 5


@dataclass(frozen=True)
class DocumentHistory:
    """What the build decided about one document."""

    id: str
    repo: str
    path: str
    document: Document | None
    """None if it was dropped."""
    reason: str = ""
    detail: str = ""
    dropped_text: str = ""
    """The text, if the corpus was built with dropped_texts."""
    won_over: tuple[tuple[str, str], ...] = ()
    """(reason, place) of up to MAX_LOST documents that were dropped in favour of this one."""

    def as_dict(self) -> dict[str, Any]:
        """The data that `lakh corpus show --json` prints."""
        data = {"kept": self.document is not None, "id": self.id, "repo": self.repo, "path": self.path}
        if self.document is None:
            return data | {"reason": self.reason, "detail": self.detail, "text": self.dropped_text}
        won_over = [{"reason": reason, "place": place} for reason, place in self.won_over]
        return data | asdict(self.document) | {"won_over": won_over}

    def describe(self) -> str:
        """The history as lines of text."""
        document = self.document
        if document is None:
            detail = f": {self.detail}" if self.detail else ""
            return f"{self.repo}/{self.path} was dropped: {self.reason} ({REASONS.get(self.reason, '')}){detail}"
        licence = f"{document.licence} ({document.licence_evidence})" if document.licence else "unknown"
        lines = [
            f"{self.repo}/{self.path}",
            f"  id        {self.id}",
            f"  source    {document.source}" + (f", which states {document.provenance}" if document.provenance else ""),
            f"  language  {document.language}" + (f", tagged {document.marks}" if document.marks else ""),
            f"  licence   {licence}",
            f"  kept      {len(document.text.encode()):,} bytes, sha256 {document.sha256}",
            *(f"  replaces  {place} ({reason})" for reason, place in self.won_over),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class DuplicateCluster:
    """A kept document and the documents that were dropped as its duplicates."""

    place: str
    exact: int
    near: int
    members: tuple[str, ...]
    """Some of the dropped documents: the first ones by name."""


def find_document(url: str, wanted: str) -> DocumentHistory:
    """The history of the one document that `wanted` matches."""
    kept = [row for batch in read_documents(url, PLACE) for row in _matches(batch, wanted)]
    dropped = [row for batch in _dropped_rows(url) for row in _matches(batch, wanted)]
    found = kept + dropped
    if not found:
        raise UserError(wanted, f"no such document in {url}", _suggestion(url, wanted))
    if len(found) > 1:
        some = ", ".join(f"{row['id'][:12]} ({row['repo']}/{row['path']})" for row in found[:SHOWN_MATCHES])
        raise UserError(wanted, f"matches {len(found)} documents: {some}", "give more of the id")
    row = found[0]
    if not kept:
        text = row.get("text") or ""
        return DocumentHistory(row["id"], row["repo"], row["path"], None, row["reason"], row["detail"], text)
    place = f"of {row['repo']}/{row['path']}"
    lost: list[tuple[str, str]] = []
    for batch in _dropped_rows(url):
        theirs = batch.filter(pc.equal(batch.column("detail"), place))
        lost += [
            (item["reason"], f"{item['repo']}/{item['path']}") for item in theirs.to_pylist() if item["reason"] in LIKE
        ]
    return DocumentHistory(row["id"], row["repo"], row["path"], _load(url, row["id"]), won_over=tuple(lost[:MAX_LOST]))


def dropped_examples(url: str, each: int) -> dict[str, list[tuple[str, str]]]:
    """(place, detail) of up to `each` dropped documents of every reason: those with the smallest ids."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for batch in _dropped_rows(url):
        for row in batch.select(["id", "repo", "path", "reason", "detail"]).to_pylist():
            rows = found.setdefault(row["reason"], [])
            rows.append((row["id"], f"{row['repo']}/{row['path']}", row["detail"]))
            if len(rows) > 64 * max(1, each):
                found[row["reason"]] = sorted(rows)[:each]
    return {reason: [row[1:] for row in sorted(rows)[:each]] for reason, rows in sorted(found.items())}


def duplicate_clusters(url: str) -> list[DuplicateCluster]:
    """The kept documents with the most duplicates. Memory is one count per document that has any."""
    sizes: Counter[tuple[str, str]] = Counter()
    for batch in _dropped_rows(url):
        rows = batch.filter(pc.is_in(batch.column("reason"), pa.array(LIKE))).select(["detail", "reason"])
        sizes.update((row["detail"], row["reason"]) for row in rows.to_pylist() if row["detail"].startswith("of "))
    totals: Counter[str] = Counter()
    for (detail, _), count in sizes.items():
        totals[detail] += count
    largest = sorted(totals, key=lambda detail: (-totals[detail], detail))[:MAX_CLUSTERS]
    members: dict[str, list[str]] = {detail: [] for detail in largest}
    for batch in _dropped_rows(url):
        for row in batch.filter(pc.is_in(batch.column("detail"), pa.array(largest, pa.string()))).to_pylist():
            if row["reason"] in LIKE:
                found = [*members[row["detail"]], f"{row['repo']}/{row['path']}"]
                members[row["detail"]] = sorted(found)[:MAX_MEMBERS]
    exact, near = LIKE
    return [
        DuplicateCluster(detail.removeprefix("of "), sizes[detail, exact], sizes[detail, near], tuple(members[detail]))
        for detail in largest
    ]


def _dropped_rows(url: str) -> Iterator[Any]:
    for entry in read_report(url).dropped_files:
        yield from read_rows(check_shard(url, entry))


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
    raise AssertionError("the document was listed a moment ago")


def _suggestion(url: str, wanted: str) -> str:
    places = [f"{row['repo']}/{row['path']}" for batch in read_documents(url, PLACE) for row in batch.to_pylist()]
    near = difflib.get_close_matches(wanted, places, n=1) or [place for place in places if place.endswith(wanted)]
    return f"did you mean {near[0]}?" if near else "give an id (at least 4 digits of it) or repo/path"
