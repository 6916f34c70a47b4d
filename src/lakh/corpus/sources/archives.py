"""Archives as sources: tar (gz, bz2, xz, zstd), zip, wheels, sdists, npm packages, Debian source tarballs.

Read as a stream, member by member; nothing is unpacked to disk. A member that leads out of the archive (an absolute
name, `..`), a link or a device is dropped with its reason; an archive that unpacks to more than MAX_RATIO times its
size is read no further. Two passes: the first finds the licence (licence files or package metadata), the second reads
the code; both cost only decompression.

A large zip or uncompressed tar is read in parts by different tasks: a member belongs to the part in which it begins. A
compressed tar is one stream, which has to be read from its beginning, and has one part.

Memory: one member of at most max_file_bytes, and the names of a zip's directory. A damaged archive gives what could be
read, then a row with the reason.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa

from lakh import storage
from lakh.corpus.sources.licence_evidence import LicenceEvidence, is_licence_evidence
from lakh.corpus.sources.listing import RawDocument, ReadPredicate
from lakh.corpus.sources.notebooks import size_limit

__all__ = ["ENDINGS", "archive_parts", "below", "evidence_of", "kind_of", "members", "stem_of"]

MAX_RATIO = 200
"""Code compresses to a quarter, repeated code to a fiftieth; a bomb to a thousandth and less."""
MIN_LIMIT_BYTES = 64 << 20
"""Small archives may unpack to this size whatever their ratio."""
XZ_MEMORY_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
PART_BYTES = 64 << 20
"""A larger archive is divided into parts of this size, where its format allows it."""

ENDINGS = {
    ".tar": "tar", ".tar.gz": "tar", ".tgz": "tar", ".tar.bz2": "tar", ".tbz2": "tar", ".tar.xz": "tar", ".txz": "tar",
    ".tar.zst": "tar", ".crate": "tar", ".zip": "zip", ".whl": "zip", ".jar": "zip",
}  # fmt: skip
DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError,
    NotImplementedError, RuntimeError, pa.ArrowException, KeyError, IndexError, OverflowError, UnicodeError,
)  # fmt: skip


Entry = tuple[str, int, bytes | None, str, str]
"""(path, size, content, reason, detail) of a member of an archive: its content, or the reason why it has none."""


Part = tuple[int, int, int] | None
"""(number, number of parts, bytes of the archive); None is the whole archive."""


class _ArchiveBomb(Exception):
    def __str__(self) -> str:
        return f"it unpacks to more than {MAX_RATIO} times its size"


def kind_of(name: str) -> str:
    """ "tar", "zip", or "" if the name is not that of an archive."""
    lower = name.lower()
    return next((kind for ending, kind in ENDINGS.items() if lower.endswith(ending)), "")


def stem_of(name: str) -> str:
    """The name without its ending: requests-2.32.tar.gz -> requests-2.32."""
    lower = name.lower()
    return next(
        (name[: -len(ending)] for ending in sorted(ENDINGS, key=len, reverse=True) if lower.endswith(ending)), name
    )


def archive_parts(url: str, size_bytes: int) -> int:
    """Into how many parts an archive is divided; a compressed tar and one that cannot be read have one."""
    parts = max(1, -(-size_bytes // PART_BYTES))
    try:
        with storage.open_read(url) as file:
            if kind_of(url) == "zip":
                with zipfile.ZipFile(file) as archive:
                    return max(1, min(parts, len(archive.infolist())))
            return parts if _is_plain_tar(file) else 1
    except DAMAGE:
        return 1


def members(
    url: str, max_file_bytes: int, wanted: ReadPredicate, repo: str = "", part: int | None = None
) -> Iterator[RawDocument]:
    """Every entry of a part, or of the whole archive, that is or should be a file; with content if `wanted`."""
    walk = _zip if kind_of(url) == "zip" else _tar
    try:
        with storage.open_read(url) as file:
            archive_bytes = file.seek(0, io.SEEK_END)
            limit_bytes = max(MIN_LIMIT_BYTES, archive_bytes * MAX_RATIO)
            file.seek(0)
            num_parts = 1 if part is None else archive_parts(url, archive_bytes)
            chosen = None if part is None or num_parts == 1 else (part, num_parts, archive_bytes)
            for path, size, content, reason, detail in walk(file, limit_bytes, max_file_bytes, wanted, chosen):
                yield RawDocument(repo, path, size, content, reason=reason, detail=detail)
    except _ArchiveBomb as error:
        yield RawDocument(repo, "", reason="unsafe-archive", detail=f"the rest: {error}")
    except DAMAGE as error:
        yield RawDocument(repo, "", reason="unreadable", detail=f"the rest of the archive: {_line(error)}")


def evidence_of(url: str) -> LicenceEvidence:
    """The files of the archive that state its licence."""
    evidence, top = LicenceEvidence(), stem_of(url.rpartition("/")[2])

    def wanted(path: str, size_bytes: int) -> bool:
        return size_bytes <= LicenceEvidence.MAX_BYTES and is_licence_evidence(below(path, top))

    for member in members(url, LicenceEvidence.MAX_BYTES, wanted):
        if member.content is not None:
            evidence.add(below(member.path, top), member.content)
    return evidence


def below(path: str, top: str) -> str:
    """The path inside the archive's own top folder: pkg-1.0/src/a.py -> src/a.py."""
    first, _, rest = path.partition("/")
    return (
        rest if rest and (first == top or first == "package" or first.startswith(top.partition("_")[0] + "-")) else path
    )


def _is_plain_tar(file: IO[bytes]) -> bool:
    """Whether the file is an uncompressed tar, by the mark in its first header."""
    file.seek(257)
    is_plain = file.read(5) == b"ustar"
    file.seek(0)
    return is_plain


def _is_in(part: Part, offset: int, total: int) -> bool:
    return part is None or offset * part[1] // max(1, total) == part[0]


def _tar(file: IO[bytes], limit_bytes: int, max_file_bytes: int, wanted: ReadPredicate, part: Part) -> Iterator[Entry]:
    with contextlib.ExitStack() as stack:
        if part is not None:  # from header to header, without the content of other parts
            archive = stack.enter_context(tarfile.open(fileobj=file, mode="r:"))
        else:
            plain: Any = _LimitedStream(_unpacked(file, stack), limit_bytes)
            archive = stack.enter_context(tarfile.open(fileobj=plain, mode="r|"))
        for entry in archive:
            archive.__dict__["members"] = []  # the module keeps every entry; free them
            if part is not None and not _is_in(part, entry.offset, part[2]):
                continue
            path, reason = _safe(entry.name)
            if entry.isdir():
                continue
            if entry.issym() or entry.islnk():
                yield path, 0, None, reason or "symlink", f"a link to {entry.linkname[:100]}"
            elif not entry.isfile():
                yield path, 0, None, "unsafe-archive", "no plain file"
            elif reason:
                yield path, entry.size, None, reason, "its name leads out of the archive"
            elif wanted(path, entry.size):
                opened = archive.extractfile(entry)
                assert opened is not None
                yield path, entry.size, opened.read(size_limit(path, max_file_bytes) + 1), "", ""
            else:
                yield path, entry.size, None, "", ""


def _zip(file: IO[bytes], limit_bytes: int, max_file_bytes: int, wanted: ReadPredicate, part: Part) -> Iterator[Entry]:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        packed_bytes = sum(entry.compress_size + 1 for entry in entries)  # 1: empty members count too
        offset = 0
        for entry in entries:
            is_mine = _is_in(part, offset, packed_bytes)
            offset += entry.compress_size + 1
            if not is_mine:
                continue
            path, reason = _safe(entry.filename)
            size, mode = entry.file_size, entry.external_attr >> 16
            if entry.is_dir():
                continue
            if stat.S_ISLNK(mode):
                yield path, 0, None, reason or "symlink", "a link"
            elif reason or (mode and stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
                yield path, size, None, "unsafe-archive", "leads out, or is no plain file"
            elif entry.flag_bits & 1:
                yield path, size, None, "unreadable", "encrypted"
            elif not wanted(path, size):
                yield path, size, None, "", ""
            else:
                try:
                    with archive.open(entry) as opened:
                        content = opened.read(size_limit(path, max_file_bytes) + 1)
                except DAMAGE as error:
                    yield path, size, None, "unreadable", _line(error)
                    continue
                limit_bytes -= len(content)
                if limit_bytes < 0:
                    raise _ArchiveBomb
                yield path, size, content, "", ""


def _safe(name: str) -> tuple[str, str]:
    """(the name with / between its parts, "" or the reason why it is not a path inside the archive)."""
    name = name.encode("utf-8", "backslashreplace").decode()
    path = name.replace("\\", "/")
    bad = path.startswith("/") or ".." in path.split("/") or "\0" in path or (len(path) > 1 and path[1] == ":")
    path = path.removeprefix("./").replace("//", "/")
    return path, "unsafe-archive" if bad else ""


def _unpacked(file: IO[bytes], stack: contextlib.ExitStack) -> Any:
    """The decompressed stream of a file, by its first bytes."""
    head = file.read(6)
    file.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return stack.enter_context(gzip.GzipFile(fileobj=file))
    if head.startswith(b"BZh"):
        return stack.enter_context(bz2.BZ2File(file))
    if head.startswith(b"\xfd7zXZ\0"):
        return io.BufferedReader(_XzStream(file), BLOCK_BYTES)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return stack.enter_context(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))
    return file


class _XzStream(io.RawIOBase):
    """An xz stream with a limit on the memory of its dictionary."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decompressor.eof:
                rest = self._decompressor.unused_data or self._file.read(BLOCK_BYTES)
                if not rest.strip(b"\0"):
                    return 0
                self._decompressor = lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)
            else:
                rest = self._file.read(BLOCK_BYTES) if self._decompressor.needs_input else b""
                if self._decompressor.needs_input and not rest:
                    raise EOFError("the xz stream ends too early")
            data = self._decompressor.decompress(rest, max_length=len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


class _LimitedStream:
    """A stream that raises _ArchiveBomb after `limit_bytes`; tarfile in stream mode only calls `read`."""

    def __init__(self, file: Any, limit_bytes: int) -> None:
        self._file, self._left = file, limit_bytes

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _ArchiveBomb
        return data


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
