"""Raw bytes to a document, or to the reason why not.

`parse` is a pure function of the bytes, the path and the filters; `read_files` is the stage around it: it
opens the files of a listing, one at a time, and hands on documents in batches of about BATCH_BYTES. A file is
opened only when its name and size allow it, so a tree full of images costs nothing.

Knows nothing of syntax: a file is judged by its name, its bytes and its lines.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from lakh.config import require_positive
from lakh.corpus.dedup import digest_of
from lakh.corpus.document import STREAM, Stage, document_id
from lakh.errors import ConfigError

__all__ = ["LANGUAGES", "Filters", "Parsed", "admit", "language_of", "parse", "read_files"]

BATCH_BYTES = 8 << 20
BATCH_ROWS = 1024

# Extension -> language. `.h` is C here: telling C++ headers apart needs a parser.
LANGUAGES = {
    extension: language
    for language, extensions in {
        "bash": "sh bash",
        "c": "c h",
        "cpp": "cc cpp cxx hpp hh hxx",
        "csharp": "cs",
        "cuda": "cu cuh",
        "dart": "dart",
        "go": "go",
        "haskell": "hs",
        "java": "java",
        "javascript": "js jsx mjs cjs",
        "julia": "jl",
        "kotlin": "kt kts",
        "lua": "lua",
        "perl": "pl pm",
        "php": "php",
        "python": "py pyi",
        "r": "r",
        "ruby": "rb",
        "rust": "rs",
        "scala": "scala",
        "sql": "sql",
        "swift": "swift",
        "typescript": "ts tsx mts cts",
        "zig": "zig",
    }.items()
    for extension in extensions.split()
}

GENERATED = re.compile(
    r"@generated\b|\bdo not (edit|modify)\b.{0,80}\bgenerated|\bgenerated.{0,80}\bdo not (edit|modify)\b"
    r"|\b(auto-?|automatically |machine )generated\b"
    r"|\bthis (file|code|module) (is|was|has been) (auto-?)?generated\b",
    re.IGNORECASE | re.DOTALL,
)
GENERATED_HEAD_CHARS = 1000
MINIFIED_MIN_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Thresholds of `parse`. The line and letter limits are those commonly used for code corpora."""

    max_file_bytes: int = 1_000_000
    """Larger files are dropped as too-large, unread."""
    max_line_chars: int = 1000
    """A file with a longer line is dropped as long-lines."""
    max_mean_line_chars: float = 100.0
    """A file whose lines are longer on average is dropped as long-lines."""
    min_alphanumeric_share: float = 0.25
    """A file with a smaller share of letters and digits is dropped as low-alphanumeric."""
    min_blank_share: float = 0.02
    """A file with a smaller share of blanks and line ends counts as minified and is dropped as generated."""
    drop_generated: bool = True
    """Drop files whose first lines say that a program wrote them."""

    def __post_init__(self) -> None:
        require_positive(self, "max_file_bytes", "max_line_chars", "max_mean_line_chars")
        for name in ("min_alphanumeric_share", "min_blank_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, f"{getattr(self, name)} is not a share", "choose a value from 0 to 1")


class Parsed(NamedTuple):
    """A text, or ("", reason, detail)."""

    text: str
    reason: str = ""
    detail: str = ""


def language_of(path: str) -> str:
    """The language by file extension, "" where it is none that is collected."""
    return LANGUAGES.get(PurePosixPath(path).suffix[1:].lower(), "")


def admit(path: str, size_bytes: int, filters: Filters) -> tuple[str, str]:
    """(reason, detail) for which a file need not even be opened; ("", "") admits it."""
    if not language_of(path):
        return "not-code", PurePosixPath(path).suffix
    if size_bytes > filters.max_file_bytes:
        return "too-large", f"{size_bytes} bytes"
    return "", ""


def parse(raw: bytes, path: str, filters: Filters) -> Parsed:
    """Decode and judge the content of one file."""
    if len(raw) > filters.max_file_bytes:  # it grew since it was listed
        return Parsed("", "too-large", f"over {filters.max_file_bytes} bytes")
    if not raw.strip():
        return Parsed("", "empty")
    nul = raw.find(b"\0")
    if nul >= 0:
        return Parsed("", "binary", f"NUL at byte {nul}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Parsed("", "bad-encoding", f"byte {error.start}: {error.reason}")
    if not text.strip():
        return Parsed("", "empty")
    reason, detail = _judge(text, path, filters)
    return Parsed("" if reason else text, reason, detail)


def read_files(filters: Filters) -> Stage:
    """The stage LISTING -> STREAM: open, decode and judge every listed file."""

    def stage(listing: Iterator[Any]) -> Iterator[Any]:
        rows: list[tuple[Any, ...]] = []
        size = 0
        for batch in listing:
            for listed in batch.to_pylist():
                row = _row(listed, filters)
                rows.append(row)
                size += row[-3]
                if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
                    yield _batch(rows)
                    rows, size = [], 0
        if rows:
            yield _batch(rows)

    return stage


def _judge(text: str, path: str, filters: Filters) -> tuple[str, str]:
    lines = text.splitlines()
    longest = max(map(len, lines))
    if longest > filters.max_line_chars:
        return "long-lines", f"a line of {longest} characters"
    mean = sum(map(len, lines)) / len(lines)
    if mean > filters.max_mean_line_chars:
        return "long-lines", f"{mean:.0f} characters on average"
    if filters.drop_generated:
        if ".min." in PurePosixPath(path).name:
            return "generated", "minified by its name"
        found = GENERATED.search(text[:GENERATED_HEAD_CHARS])
        if found:
            return "generated", " ".join(found.group().split())[:80]
    # str.split and re.sub run in C: a loop over characters would be most of the cost of a build
    visible = sum(map(len, text.split()))
    if len(text) >= MINIFIED_MIN_CHARS and 1 - visible / len(text) < filters.min_blank_share:
        return "generated", "minified: almost no blanks"
    alphanumeric = len(_NOT_ALPHANUMERIC.sub("", text))
    if alphanumeric < filters.min_alphanumeric_share * len(text):
        return "low-alphanumeric", f"{alphanumeric / len(text):.0%} letters and digits"
    return "", ""


_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")


def _row(listed: dict[str, Any], filters: Filters) -> tuple[Any, ...]:
    """One row of STREAM, in its order."""
    repo, path = listed["repo"], listed["path"]
    reason, detail = listed["reason"], listed["detail"]
    text, size = "", 0
    if not reason:
        reason, detail = admit(path, listed["size_bytes"], filters)
    if not reason:
        try:
            with Path(os.fsdecode(listed["location"])).open("rb") as file:
                raw = file.read(filters.max_file_bytes + 1)
        except OSError as error:
            reason, detail = "unreadable", error.strerror or str(error)
        else:
            text, reason, detail = parse(raw, path, filters)
            size = len(raw)
    encoded = text.encode()
    return (
        document_id(repo, path),
        repo,
        path,
        language_of(path),
        listed["licence"],
        listed["source"],
        encoded,
        hashlib.sha256(encoded).hexdigest() if text else "",
        digest_of(text) if text else b"",
        size,
        reason,
        detail,
    )


def _batch(rows: list[tuple[Any, ...]]) -> Any:
    arrays = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), STREAM, strict=True)]
    return pa.record_batch(arrays, schema=STREAM)
