"""Drop the documents whose authors asked for their removal.

The opt-out list is a text file, one request a line; `#` begins a comment:

    owner:jane                   every repository of an owner
    repo:jane/parser             one repository
    path:jane/parser/src/*.py    files by repo/path, with * and ?
    sha256:9f86d08...            a text, wherever it is

Requests apply before deduplication, so that deduplication never prefers a copy that is dropped here.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

from lakh import storage
from lakh.corpus.document import Filter, drop_for, rows_of
from lakh.errors import UserError

__all__ = ["OptOut", "opt_out_filter", "read_opt_out"]

OPT_OUT_KINDS = ("owner", "repo", "path", "sha256")


@dataclass(frozen=True)
class OptOut:
    """Requests for removal."""

    owners: frozenset[str] = frozenset()
    repos: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()
    hashes: frozenset[str] = frozenset()

    def request(self, repo: str, path: str, sha256: str) -> str:
        """The request that covers a document, or ""."""
        if repo.lower() in self.repos:
            return f"repo:{repo}"
        owner = repo.partition("/")[0].lower()
        if owner in self.owners:
            return f"owner:{owner}"
        if sha256 in self.hashes:
            return f"sha256:{sha256[:12]}..."
        return next((f"path:{glob}" for glob in self.paths if fnmatch.fnmatchcase(f"{repo}/{path}", glob)), "")


def opt_out_filter(url: str) -> Filter:
    """Drop the documents that a request in the list at `url` covers (reason opt-out); "" is no list."""
    requests = read_opt_out(url) if url else OptOut()

    def apply(batch: Any) -> Any:
        return drop_for(batch, "opt-out", [requests.request(*row) for row in rows_of(batch, "repo", "path", "sha256")])

    return apply if url else lambda batch: batch


def read_opt_out(url: str) -> OptOut:
    """Read an opt-out list; a malformed line is an error, so no request is lost."""
    found: dict[str, list[str]] = {kind: [] for kind in OPT_OUT_KINDS}
    try:
        lines = storage.read_bytes(url).decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(url, "is not UTF-8 text", "write one request a line, e.g. repo:jane/parser") from None
    for number, line in enumerate(lines, 1):
        request = line.partition("#")[0].strip()
        if not request:
            continue
        kind, colon, value = request.partition(":")
        if not colon or kind not in found or not value.strip():
            known = ", ".join(f"{name}:..." for name in OPT_OUT_KINDS)
            raise UserError(f"{url}, line {number}", f"{request[:60]!r} is not a request", f"write one of: {known}")
        found[kind].append(value.strip())
    owners, repos, hashes = (frozenset(map(str.lower, found[kind])) for kind in ("owner", "repo", "sha256"))
    return OptOut(owners, repos, tuple(found["path"]), hashes)
