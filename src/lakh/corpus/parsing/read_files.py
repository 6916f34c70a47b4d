"""Raw bytes to documents, or to the reason why not.

`parse` is a pure function of the bytes, the path and the filters; `read_files` applies it to the files of a listing,
one at a time, and yields documents in batches of about BATCH_BYTES. A file is opened only if its name and size allow
it, so a tree full of images costs nothing. Looks at names, bytes and lines, not at syntax.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from lakh.config import require_positive
from lakh.corpus.document import STREAM, complete, document_id
from lakh.corpus.parsing.encodings import as_utf8
from lakh.corpus.parsing.languages import LANGUAGES, identify, is_test, is_vendored, language_of, suffix_of
from lakh.corpus.sources.listing import RawDocument
from lakh.corpus.sources.notebooks import size_limit
from lakh.corpus.sources.readers import DOCUMENTATION, open_listed
from lakh.corpus.task_progress import TaskProgress
from lakh.errors import ConfigError

__all__ = ["FileFilterSettings", "Parsed", "admit", "parse", "read_files"]

BATCH_BYTES = 8 << 20
BATCH_ROWS = 1024

GENERATED = re.compile(
    r"@generated\b|\bdo not (edit|modify)\b.{0,80}\bgenerated|\bgenerated.{0,80}\bdo not (edit|modify)\b"
    r"|\b(auto-?|automatically |machine )generated\b"
    r"|\bthis (file|code|module) (is|was|has been) (auto-?)?generated\b",
    re.IGNORECASE | re.DOTALL,
)
GENERATED_HEAD_CHARS = 1000
MINIFIED_MIN_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFilterSettings:
    """Limits for files. The line and letter limits are those commonly used for code corpora."""

    max_file_bytes: int = 1_000_000
    """Larger files are dropped as too-large without reading them."""
    max_line_chars: int = 1000
    """A file with a longer line is dropped as long-lines."""
    max_mean_line_chars: float = 100.0
    """A file whose lines are longer on average is dropped as long-lines."""
    min_alphanumeric_share: float = 0.25
    """A file with a smaller share of letters and digits is dropped as low-alphanumeric."""
    min_blank_share: float = 0.02
    """A file with a smaller share of blanks and line ends counts as minified and is dropped as generated."""
    drop_generated: bool = True
    """Drop files whose first lines say that they are generated."""
    drop_vendored: bool = True
    """Drop files in folders for third-party code (vendor, third_party, ...): they have another licence."""
    languages: tuple[str, ...] = ()
    """Keep only these languages; empty keeps all."""

    def __post_init__(self) -> None:
        for language in self.languages:
            if language not in LANGUAGES:
                near = difflib.get_close_matches(language, LANGUAGES, n=1)
                todo = f"did you mean {near[0]}?" if near else f"choose from: {', '.join(sorted(LANGUAGES))}"
                raise ConfigError("languages", f"{language!r} is not known", todo)
        require_positive(self, "max_file_bytes", "max_line_chars", "max_mean_line_chars")
        for name in ("min_alphanumeric_share", "min_blank_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, f"{getattr(self, name)} is not a share", "choose a value from 0 to 1")


class Parsed(NamedTuple):
    """A text, or ("", reason, detail)."""

    text: str
    reason: str = ""
    detail: str = ""


def admit(path: str, size_bytes: int, filters: FileFilterSettings, *, documentation: bool = False) -> tuple[str, str]:
    """(reason, detail) if a file need not be opened; ("", "") admits it."""
    language = language_of(path)
    if not language and (suffix_of(path) or documentation):  # without a suffix it may be a script: see its first line
        return "not-code", suffix_of(path)
    if language and (language in DOCUMENTATION) is not documentation:
        return "not-code", suffix_of(path)
    if language and filters.languages:  # a header may be C or C++
        possible = {"c", "cpp"} if language == "c" and suffix_of(path).lower() == ".h" else {language}
        if possible.isdisjoint(filters.languages):
            return "other-language", language
    if filters.drop_vendored and is_vendored(path):
        return "vendored", ""
    if size_bytes > size_limit(path, filters.max_file_bytes):
        return "too-large", f"{size_bytes} bytes"
    return "", ""


def parse(raw: bytes, path: str, filters: FileFilterSettings) -> Parsed:
    """Decode and check the content of one file, which as_utf8 has made UTF-8 where its encoding is known."""
    if len(raw) > filters.max_file_bytes:  # it has grown since it was listed
        return Parsed("", "too-large", f"over {filters.max_file_bytes} bytes")
    if raw.isspace() or not raw:
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
    reason, detail = _reason(raw, text, path, filters)
    return Parsed("" if reason else text, reason, detail)


def read_files(
    listing: Iterator[Any],
    filters: FileFilterSettings,
    *,
    dropped_texts: bool = False,
    task: TaskProgress | None = None,
) -> Iterator[Any]:
    """LISTING batches to STREAM batches: open, decode and check every listed file and document of a container.

    With `dropped_texts`, the text of a document that is dropped here goes to `dropped_text`.
    """
    progress = task or TaskProgress()
    rows: list[dict[str, Any]] = []
    size = 0

    def is_wanted(path: str, size_bytes: int) -> bool:
        return not admit(path, size_bytes, filters)[0]

    for batch in listing:
        for listed in batch.to_pylist():
            for raw in _marked(listed, open_listed(listed, filters.max_file_bytes, is_wanted), progress):
                row = _row(raw, listed["source"], filters)
                if dropped_texts:
                    row["dropped_text"] = (raw.content or b"").decode("utf-8", "replace") if row["reason"] else ""
                rows.append(row)
                size += row["size_bytes"]
                if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
                    yield _batch(rows)
                    rows, size = [], 0
    if rows:
        yield _batch(rows)


def _marked(listed: dict[str, Any], documents: Iterator[RawDocument], task: TaskProgress) -> Iterator[RawDocument]:
    """The documents of a listed file, each marked as progress first; the rest of a file that crashes is skipped."""
    name = f"{listed['repo']}/{listed['path']}:{listed['part']}"
    for number in itertools.count():
        place = f"{name} after {number} documents"
        if task.skips(place):
            rest = f"the rest of {name}, after {number} documents" if number else ""
            yield RawDocument(listed["repo"], listed["path"], reason="crashed", detail=rest)
            return
        task.mark(place)
        raw = next(documents, None)
        if raw is None:
            return
        yield raw


def _reason(raw: bytes, text: str, path: str, filters: FileFilterSettings) -> tuple[str, str]:
    lines = raw.splitlines()
    longest = max(map(len, lines))
    if longest > filters.max_line_chars:
        longest = max(map(len, text.splitlines()))  # characters, not bytes
        if longest > filters.max_line_chars:
            return "long-lines", f"a line of {longest} characters"
    mean = len(text) / len(lines) - 1
    if mean > filters.max_mean_line_chars:
        return "long-lines", f"{mean:.0f} characters on average"
    if filters.drop_generated:
        if ".min." in path.rpartition("/")[2]:
            return "generated", "minified by its name"
        head = text[:GENERATED_HEAD_CHARS]
        found = GENERATED.search(head) if "generated" in head.lower() else None
        if found:
            return "generated", " ".join(found.group().split())[:80]
    visible, alphanumeric = _count(raw, text)
    if len(text) >= MINIFIED_MIN_CHARS and 1 - visible / len(text) < filters.min_blank_share:
        return "generated", "minified: almost no blanks"
    if alphanumeric < filters.min_alphanumeric_share * len(text):
        return "low-alphanumeric", f"{alphanumeric / len(text):.0%} letters and digits"
    return "", ""


def _count(raw: bytes, text: str) -> tuple[int, int]:
    """(visible characters, letters and digits); everything outside ASCII counts as a letter.

    Deletes bytes, which runs in C: a loop over characters would dominate the cost of a build.
    """
    foreign = 0 if text.isascii() else len(text) - len(raw.translate(None, _FOREIGN))
    visible = len(raw.translate(None, _BLANK + _FOREIGN))
    return visible + foreign, len(raw.translate(None, _NOT_ALPHANUMERIC + _FOREIGN)) + foreign


_FOREIGN = bytes(range(128, 256))
_BLANK = bytes(byte for byte in range(128) if chr(byte).isspace())
_NOT_ALPHANUMERIC = bytes(byte for byte in range(128) if not chr(byte).isalnum())


def _row(raw: RawDocument, source: str, filters: FileFilterSettings) -> dict[str, Any]:
    """The first columns of STREAM."""
    reason, detail, text, size, language = raw.reason, raw.detail, "", 0, raw.language
    if not reason:
        reason, detail = admit(raw.path, raw.size_bytes, filters, documentation=raw.documentation)
    if not reason and raw.content is not None:
        size, content = len(raw.content), as_utf8(raw.content)
        if not language:
            found = identify(raw.path, content)
            language = found.language
            if not language:
                reason, detail = "not-code", found.reason
        if language and filters.languages and language not in filters.languages:
            reason, detail = "other-language", language
        if not reason:
            text, reason, detail = parse(content, raw.path, filters)
    encoded = text.encode()
    return {
        "id": document_id(raw.repo, raw.path),
        "repo": raw.repo,
        "path": raw.path,
        "language": language or language_of(raw.path),
        "licence": raw.licence,
        "source": source,
        "licence_evidence": raw.licence_evidence,
        "provenance": raw.provenance,
        "marks": "test" if is_test(raw.path) else "",
        "text": encoded,
        "sha256": hashlib.sha256(encoded).hexdigest() if text else "",
        "size_bytes": size,
        "reason": reason,
        "detail": detail,
    }


def _batch(rows: list[dict[str, Any]]) -> Any:
    known = [STREAM.field(name) for name in rows[0]]
    arrays = [pa.array([row[column.name] for row in rows], column.type) for column in known]
    return complete(pa.record_batch(arrays, schema=pa.schema(known)))
