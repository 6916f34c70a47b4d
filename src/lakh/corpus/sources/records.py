"""Records as sources: JSON lines and Parquet with one document per record, such as The Stack's files.

Each field is the first of several known names that a record has (TEXT, REPO, ...). A record whose text is not a string,
or which cannot be read, gives a row with its reason, and reading continues. Synthetic records (`synthetic:PATH`) must
state their origin: `provenance`, or a model and a prompt; others are dropped.

Memory: one line (at most MAX_LINE_BYTES of it), or one batch of a Parquet row group.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakh import storage
from lakh.corpus.sources.listing import RawDocument

__all__ = ["jsonl_parts", "read_jsonl", "read_parquet", "row_groups"]

TEXT = ("content", "text", "code")
REPO = ("repo_name", "max_stars_repo_name", "repository_name", "repo", "repository")
PATH = ("file_path", "path", "max_stars_repo_path", "file_name", "filename")
LICENCE = ("license", "licence", "licenses", "max_stars_repo_licenses", "detected_licenses")
PROVENANCE = ("provenance", "model", "generator", "prompt", "seed_document", "created", "source")
MAX_LINE_BYTES = 128 << 20
PART_BYTES = 64 << 20
"""A larger JSON-lines file is read in parts of this size, by different tasks."""
BATCH_ROWS = 256


def jsonl_parts(url: str, size_bytes: int) -> int:
    """Into how many parts a JSON-lines file is divided: of PART_BYTES each; a gzip file has one."""
    return 1 if url.lower().endswith(".gz") else max(1, -(-size_bytes // PART_BYTES))


def read_jsonl(url: str, part: int, repo: str, *, synthetic: bool) -> Iterator[RawDocument]:
    """The documents of one part of a JSON-lines file: the lines that begin in it. Plain or gzip."""
    name = url.rpartition("/")[2]
    try:
        with storage.open_read(url) as file:
            stream: Any = gzip.GzipFile(fileobj=file) if file.read(2) == b"\x1f\x8b" else file
            file.seek(0)
            is_plain = stream is file
            if part and not is_plain:  # gzip under another name: its first part has everything
                return
            for number, line in _lines(file if is_plain else io.BufferedReader(stream), part * PART_BYTES, is_plain):
                place = f"{name}:{part}:{number}" if part else f"{name}:{number}"
                if line is None:
                    yield RawDocument(
                        repo, place, reason="too-large", detail=f"a line of more than {MAX_LINE_BYTES} bytes"
                    )
                elif line.strip():
                    yield _from_json(line, repo, place, synthetic)
    except (OSError, EOFError) as error:
        yield RawDocument(repo, name, reason="unreadable", detail=f"the rest: {error}"[:200])


def row_groups(url: str) -> int:
    """The number of row groups of a Parquet file; 1 if it cannot be read, which the reader reports."""
    try:
        with storage.open_read(url) as file:
            return max(1, int(pq.ParquetFile(file).num_row_groups))
    except (pa.ArrowException, OSError):
        return 1


def read_parquet(url: str, part: int, repo: str, *, synthetic: bool) -> Iterator[RawDocument]:
    """The documents of one row group."""
    name, number = url.rpartition("/")[2], 0
    try:
        with storage.open_read(url) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            known = {*TEXT, *REPO, *PATH, *LICENCE, *PROVENANCE}
            columns = [column for column in parquet.schema_arrow.names if column in known]
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=[part], columns=columns):
                for record in batch.to_pylist():
                    yield _document(record, repo, f"{name}:{part}:{number}", synthetic)
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        detail = f"row group {part} after {number} rows: {error}".partition("\n")[0][:200]
        yield RawDocument(repo, f"{name}:{part}", reason="bad-record", detail=detail)


def _lines(file: IO[bytes], begin: int, is_plain: bool) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line) of the lines that begin in the part at `begin`; None for one that is too long, skipped."""
    number, at = 0, 0
    if is_plain:
        at = max(0, begin - 1)
        file.seek(at)
        if begin:  # the line around the beginning belongs to the part before, unless it ends just there
            at += _skip_line(file)
    while (not is_plain or at < begin + PART_BYTES) and (line := file.readline(MAX_LINE_BYTES)):
        number += 1
        at += len(line)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            at += _skip_line(file)
            yield number, None
        else:
            yield number, line


def _skip_line(file: IO[bytes]) -> int:
    """Skip the rest of a line, however long; returns its bytes."""
    skipped = 0
    while rest := file.readline(MAX_LINE_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _from_json(line: bytes, repo: str, place: str, synthetic: bool) -> RawDocument:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RawDocument(repo, place, len(line), reason="bad-record", detail=f"not JSON: {error}"[:200])
    if not isinstance(record, dict):
        return RawDocument(
            repo, place, len(line), reason="bad-record", detail=f"not an object but {type(record).__name__}"
        )
    return _document(record, repo, place, synthetic)


def _document(record: Mapping[str, Any], repo: str, place: str, synthetic: bool) -> RawDocument:
    if isinstance(record.get("file"), Mapping):  # a GitHub archive's record: {"repo": {"name"}, "file": {"path", ...}}
        record = {**record, **record["file"]}
    if isinstance(record.get("repo"), Mapping):
        record = {**record, "repo": record["repo"].get("name")}
    text = _first(record, TEXT)
    if not isinstance(text, str):
        found = f"no text: none of {', '.join(TEXT)} is a string"
        return RawDocument(repo, place, reason="bad-record", detail=found)
    path = _first(record, PATH)
    content = text.encode("utf-8", "surrogatepass")
    raw = RawDocument(
        _clean(_first(record, REPO)) or repo,
        _clean(path) or f"{place.partition(':')[0]}/{hashlib.sha256(content).hexdigest()[:16]}.{_extension(record)}",
        len(content),
        content,
    )
    raw.licence = _licence(_first(record, LICENCE))
    raw.licence_evidence = "record" if raw.licence else ""
    stated = {name: record[name] for name in PROVENANCE if record.get(name)}
    if synthetic and not stated:
        raw.content, raw.reason = None, "bad-record"
        raw.detail = f"synthetic, and does not say from where: none of {', '.join(PROVENANCE)}"
    elif synthetic:
        raw.provenance = json.dumps(stated, sort_keys=True, default=str)
    return raw


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _clean(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    return value.strip().replace("\0", "").lstrip("/").encode("utf-8", "backslashreplace").decode()[:1000]


def _licence(value: Any) -> str:
    if isinstance(value, list | tuple):  # The Stack: the detected licences, any of which may apply
        value = " AND ".join(sorted({item for item in value if isinstance(item, str) and item}))
    return value[:200] if isinstance(value, str) and value.lower() not in ("unknown", "none", "no_license") else ""


def _extension(record: Mapping[str, Any]) -> str:
    """The file extension of the language that a record states."""
    from lakh.corpus.parsing.languages import LANGUAGES

    language = str(record.get("language") or record.get("lang") or "").lower()
    return str(LANGUAGES[language]["extensions"][0]) if language in LANGUAGES else "txt"
