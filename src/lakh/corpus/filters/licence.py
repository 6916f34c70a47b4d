"""Which licences are taken, and whose work is not: two stages that need a document's place, licence and head alone.

Licences fall into four classes: permissive (licences.py), copyleft, none (nothing is known), unknown (something is
said, and no known licence explains it). The policy names the classes that are taken. A notice in the head of a file
goes before the licence of its repository: files keep their authors' terms wherever they are copied to.

The opt-out list is a text file, one request a line, `#` begins a comment:

    owner:jane                   every repository of an owner
    repo:jane/parser             one repository
    path:jane/parser/src/*.py    files by repo/path, with * and ?
    sha256:9f86d08...            a text, wherever it is

Requests are honoured before deduplication: a copy elsewhere is never removed in favour of one that may not stay.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from lakh import storage
from lakh.corpus.document import Stage, drop
from lakh.corpus.licences.detect import HEAD_BYTES, UNKNOWN, header_licence
from lakh.corpus.licences.metadata import classify_expression
from lakh.errors import ConfigError, UserError

__all__ = ["LicenceSettings", "OptOut", "class_of", "filter_licences", "opt_out", "read_opt_out"]

LicenceClass = Literal["permissive", "copyleft", "none", "unknown"]
COPYLEFT = re.compile(
    r"(?i)\b(A?GPL|LGPL|MPL|EPL|CDDL|EUPL|OSL|CECILL|SSPL|CC-BY-SA|CC-BY-NC-SA|GFDL|ODbL|CPL|IPL|QPL|SISSL|APSL|RPL|Sleepycat|MS-RL)-?"
)
OPT_OUT_KINDS = ("owner", "repo", "path", "sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class LicenceSettings:
    """Which licences are taken."""

    take: tuple[str, ...] = ("permissive", "none")
    """Classes of licences to take: permissive, copyleft, none (nothing is known), unknown (not recognised)."""
    also: tuple[str, ...] = ()
    """SPDX identifiers to take whatever their class."""
    headers: bool = True
    """Let a licence notice at the top of a file go before the licence of its repository."""
    opt_out: str = ""
    """A file of opt-out requests; see lakh.corpus.filters.licence."""

    def __post_init__(self) -> None:
        known = ("permissive", "copyleft", "none", "unknown")
        for name in self.take:
            if name not in known:
                raise ConfigError("take", f"{name!r} is not a class of licences", f"choose from: {', '.join(known)}")


@dataclass(frozen=True)
class OptOut:
    """Requests to leave work out."""

    owners: frozenset[str] = frozenset()
    repos: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()
    hashes: frozenset[str] = frozenset()

    def request(self, repo: str, path: str, sha256: str) -> str:
        """The request that a document falls under; "" where none does."""
        if repo.lower() in self.repos:
            return f"repo:{repo}"
        owner = repo.partition("/")[0].lower()
        if owner in self.owners:
            return f"owner:{owner}"
        if sha256 in self.hashes:
            return f"sha256:{sha256[:12]}..."
        return next((f"path:{glob}" for glob in self.paths if fnmatch.fnmatchcase(f"{repo}/{path}", glob)), "")


def class_of(expression: str) -> LicenceClass:
    """The class of an SPDX expression."""
    if not expression:
        return "none"
    if classify_expression(expression).permissive:
        return "permissive"
    return "copyleft" if COPYLEFT.search(expression) and UNKNOWN not in expression else "unknown"


def filter_licences(settings: LicenceSettings) -> Stage:
    """The stage that sets `licence` from headers and drops what the policy does not take (reason licence)."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield _filter(batch, settings)

    return stage


def opt_out(requests: OptOut) -> Stage:
    """The stage that drops what falls under a request (reason opt-out)."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = (batch.column(name).to_pylist() for name in ("repo", "path", "sha256"))
            details = [requests.request(*row) for row in zip(*columns, strict=True)]
            yield drop(batch, ["opt-out" if detail else "" for detail in details], details)

    return stage


def read_opt_out(url: str) -> OptOut:
    """Read an opt-out list; a line that cannot be understood is an error, never a request that is forgotten."""
    found: dict[str, list[str]] = {kind: [] for kind in OPT_OUT_KINDS}
    try:
        lines = storage.read_bytes(url).decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(url, "is not UTF-8 text", "write one request a line, e.g. repo:jane/parser") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        kind, sign, value = words.partition(":")
        if not sign or kind not in found or not value.strip():
            known = ", ".join(f"{name}:..." for name in OPT_OUT_KINDS)
            raise UserError(f"{url}, line {number}", f"{words[:60]!r} is not a request", f"write one of: {known}")
        found[kind].append(value.strip())
    return OptOut(
        frozenset(value.lower() for value in found["owner"]),
        frozenset(value.lower() for value in found["repo"]),
        tuple(found["path"]),
        frozenset(value.lower() for value in found["sha256"]),
    )


def _filter(batch: Any, settings: LicenceSettings) -> Any:
    names = ("text", "licence", "licence_evidence", "reason")
    texts = batch.column("text")
    licences, evidence, reasons = (batch.column(name).to_pylist() for name in names[1:])
    dropped, details = [""] * len(licences), [""] * len(licences)
    for row, reason in enumerate(reasons):
        if reason:
            continue
        if settings.headers:
            head = texts[row].as_buffer()[:HEAD_BYTES].to_pybytes()
            found = header_licence(head)
            if found.expression:
                licences[row], evidence[row] = found.expression, found.evidence
        name = class_of(licences[row])
        if name not in settings.take and licences[row] not in settings.also:
            dropped[row], details[row] = (
                "licence",
                f"{licences[row] or 'none'} is {name} ({evidence[row] or 'metadata'})",
            )
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["licence"] = pa.array(licences, pa.string())
    columns["licence_evidence"] = pa.array(evidence, pa.string())
    batch = pa.record_batch([columns[name] for name in batch.schema.names], schema=batch.schema)
    return drop(batch, dropped, details)
