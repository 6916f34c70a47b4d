"""Detect the licence of a repository or of one file, as an SPDX expression with its evidence.

`repository_licence` checks a repository's licence files (LICENSE, COPYING, gpl.txt, LICENSES/, docs/COPYING, PATENTS),
then its package metadata, then its README. Files that disagree are joined with AND: users must respect all of them; a
file that is no known licence is UNKNOWN and stays in the expression. `header_licence` reads the first lines of a source
file: an SPDX line, or a well-known notice.

A licence file cannot distinguish GPL-3.0-only from GPL-3.0-or-later (the texts are identical); a header notice can.

Pure functions over names and bytes; accept any content. Cost: see spdx_texts.py; headers are the first HEAD_BYTES.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from lakh.corpus.licences.expressions import TABLES
from lakh.corpus.licences.metadata import classify_metadata
from lakh.corpus.licences.spdx_texts import SIMILAR, identify_text

__all__ = ["HEAD_BYTES", "OWN", "UNKNOWN", "DetectedLicence", "header_licence", "is_licence_file", "repository_licence"]

UNKNOWN = "LicenseRef-unknown"
OWN = "LicenseRef-own"
"""Of code whose user says that it is their own."""
HEAD_BYTES = 4096

LICENCE_NAME = re.compile(
    r"(un)?licen[cs]e(s)?([._\-].*)?|(gnu[._\-]?)?[al]?gpl([._\-]?v?\d(\.\d)?)?(\.(txt|md|html?))?|.*[._\-]licen[cs]e(\.(txt|md|rst))?|copying([._\-].*)?|copyright(\.(txt|md))?|patents(\.(txt|md))?",
    re.IGNORECASE,
)
NOTICES = [(re.compile(pattern.encode()), licence) for pattern, licence in TABLES["notices"]]
LICENCE_FOLDERS = frozenset(("doc", "docs", "legal", "licence", "license", "src", "lib"))
RESTRICTION = re.compile("|".join(TABLES["restrictions"]), re.IGNORECASE)
NOT_TEXT = re.compile(r"\.(py|js|ts|go|rs|java|c|h|cpp|json|xml|header|spdx|tmpl|template)$", re.IGNORECASE)


class DetectedLicence(NamedTuple):
    expression: str
    """SPDX, "" if nothing was found."""
    evidence: str


def is_licence_file(path: str) -> bool:
    """Whether a path is that of a licence file of the repository."""
    place = PurePosixPath(path)
    if len(place.parts) == 2 and place.parts[0].upper() == "LICENSES":
        return place.suffix in ("", ".txt", ".md")
    if len(place.parts) == 2 and place.parts[0].lower() not in LICENCE_FOLDERS:
        return False
    return len(place.parts) <= 2 and bool(LICENCE_NAME.fullmatch(place.name)) and not NOT_TEXT.search(place.name)


def repository_licence(files: Mapping[str, bytes]) -> DetectedLicence:
    """The licence from the top-level files of a repository (path -> content; other files are ignored)."""
    found: dict[str, str] = {}
    for path in sorted(files):
        if is_licence_file(path):
            name, evidence = _file_licence(path, files[path])
            found.setdefault(name, f"{path}: {evidence}")
    names = _reduced(set(found))
    declared = _declared(files)
    if names:
        if names == {UNKNOWN} and declared.expression:
            names.add(declared.expression)
            found[declared.expression] = declared.evidence
        return DetectedLicence(_joined(names), "; ".join(found[name] for name in sorted(names)))
    if declared.expression:
        return declared
    for path in sorted(files):
        if re.fullmatch(r"readme([._\-].*)?", path, re.IGNORECASE):
            name = _readme_licence(files[path])
            if name:
                return DetectedLicence(name, f"{path} names it")
    return DetectedLicence("", "nothing in the repository speaks of a licence")


def header_licence(head: bytes) -> DetectedLicence:
    """The licence in the first HEAD_BYTES of a source file; ("", "") for most files."""
    head = head[:HEAD_BYTES]
    lowered = head.lower()
    if b"licen" not in lowered:
        return DetectedLicence("", "")
    spdx = re.search(rb"SPDX-License-Identifier:[ \t]*([^\r\n]{1,200})", head, re.IGNORECASE)
    written = re.sub(r"[\s*/#\->!]+$", "", spdx.group(1).decode("utf-8", "replace")).strip() if spdx else ""
    if re.fullmatch(r"\(?[A-Za-z0-9][\w.+\-() ]{1,120}", written):  # excludes code that searches for such lines
        expression = re.sub(r"(?i)\b(A?GPL|LGPL)-(\d\.\d)\b(?!-|\+|\.)", r"\1-\2-only", written)
        return DetectedLicence(
            re.sub(r"(?i)\b(A?GPL|LGPL)-(\d\.\d)\+", r"\1-\2-or-later", expression), "SPDX line in the header"
        )
    words = b" ".join(re.findall(rb"[a-z0-9.]+", lowered))
    for pattern, name in NOTICES:
        match = pattern.search(words)
        if match:
            expression = match.expand(name.encode()).decode() if "\\" in name else name
            if "GPL" in expression:
                expression = _gnu(expression, words)
            return DetectedLicence(expression, "notice in the header")
    return DetectedLicence("", "")


def _gnu(name: str, words: bytes) -> str:
    base = name if name.count(".") else f"{name}.0"
    return f"{base}-or-later" if b"any later version" in words else f"{base}-only"


def _file_licence(path: str, content: bytes) -> tuple[str, str]:
    content = content.removeprefix(b"\xef\xbb\xbf")
    if path.lower().endswith((".html", ".htm")):
        content = re.sub(rb"<[^>]*>", b" ", content)
    match = identify_text(content)
    permissive = match.licence and classify_metadata(expression=match.licence).permissive
    added = RESTRICTION.search(" ".join(content.decode("utf-8", "replace").split())) if permissive else None
    if added:
        return UNKNOWN, f"{match.similarity:.0%} the text of {match.licence}, with {added.group()[:40]!r}"
    if match.licence:
        return match.licence, f"{match.similarity:.0%} the text of {match.licence}"
    if match.similarity >= SIMILAR:
        return UNKNOWN, f"{match.similarity:.0%} the text of {match.nearest}: a modified licence"
    header = header_licence(content)
    if header.expression and len(content) < HEAD_BYTES:
        return header.expression, header.evidence
    short = " ".join(content.decode("utf-8", "replace").split())
    decision = classify_metadata(text=short) if 0 < len(short) <= 120 and "licen" in short.lower() else None
    if decision is not None and decision.licence:
        return decision.licence, "named in the file"
    return UNKNOWN, "no licence that is known" if content.strip() else "empty"


def _reduced(names: set[str]) -> set[str]:
    """The GPL text beside an LGPL one belongs to it."""
    if any(name.startswith("LGPL-3.0") for name in names):
        names = {name for name in names if not name.startswith("GPL-3.0")}
    return names


def _joined(names: set[str]) -> str:
    parts = [f"({name})" if " OR " in name and len(names) > 1 else name for name in sorted(names)]
    return " AND ".join(parts)


def _declared(files: Mapping[str, bytes]) -> DetectedLicence:
    """The licence that package metadata declares."""
    gemspecs = [path for path in sorted(files) if path.endswith(".gemspec") and "/" not in path]
    for path, read in (
        ("pyproject.toml", _pyproject),
        ("Cargo.toml", lambda text: str(tomllib.loads(text).get("package", {}).get("license", ""))),
        ("package.json", lambda text: _text_of(json.loads(text).get("license", ""))),
        ("DESCRIPTION", lambda text: _line(text, r"^License:\s*(.+)$")),
        ("setup.cfg", lambda text: _line(text, r"^license\s*=\s*(.+)$")),
        ("setup.py", _setup_py),
        ("composer.json", lambda text: _text_of(json.loads(text).get("license", ""))),
        ("pom.xml", lambda text: _line(text, r"<license>\s*<name>\s*([^<]{2,100}?)\s*</name>")),
        *((path, lambda text: _line(text, r"\.licenses?\s*=\s*\[?\s*[\"']([^\"']+)")) for path in gemspecs),
    ):
        if path in files:
            try:
                written = read(files[path].decode("utf-8", "replace")).strip()
            except (ValueError, AttributeError, TypeError, RecursionError):
                continue  # ignore damaged metadata
            if written:
                decision = classify_metadata(expression=written.replace("/", " OR "))
                if not decision.permissive:
                    decision = classify_metadata(text=written)
                return DetectedLicence(decision.licence or UNKNOWN, f"{path} says {written[:60]}")
    return DetectedLicence("", "")


def _pyproject(text: str) -> str:
    return _text_of(tomllib.loads(text).get("project", {}).get("license", ""))


def _setup_py(text: str) -> str:
    said = _line(text, r"\blicense\s*=\s*[\"']([^\"']{2,200})")
    return said or _line(text, r"License :: (?:OSI Approved :: )?([^\"']{2,100})")


def _text_of(value: object) -> str:
    if isinstance(value, list) and value:
        return " OR ".join(_text_of(item) for item in value)
    if isinstance(value, dict):
        return str(value.get("text") or value.get("type") or "")
    return value if isinstance(value, str) else ""


def _line(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1) if found else ""


def _readme_licence(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    found = re.search(r"(?ims)^[#=*\s]{0,8}(?:copyright and )?licen[cs](?:e|ing)\b[^\n]*\n(.{0,400})", text)
    if found:
        decision = classify_metadata(text=" ".join(found.group(1).split())[:120])
        if decision.licence:
            return decision.licence
    if RESTRICTION.search(" ".join(text.split())) and re.search("(?i)licen", text):
        return UNKNOWN
    stated = re.search(
        r"(?i)(?:licen[cs]ed?|released|distributed|available|terms|under)\b[^\n.]{0,60}?\b([AL]?GPL|MPL|EPL)", text
    )
    if stated or re.search(r"(?i)GNU (?:Affero |Lesser |Library )?General Public", text):
        header = header_licence(b"license " + content)
        return header.expression or (stated.group(1).upper() if stated else "GPL-2.0-only")
    return ""
