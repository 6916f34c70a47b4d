"""Where raw files come from: the words of `lakh corpus build SRC...` made into listings.

    PATH                 a folder; its name is the repository's name
    NAME=PATH            the same under another name
    installed:stdlib     the standard library of the running Python (PSF-2.0), without its tests
    installed:packages   installed distributions whose metadata names a permissive licence

A listing opens no file. It is walked in sorted order, so the same tree always gives the same listing. Hidden
folders, __pycache__ and node_modules are no part of a source; links are never followed out of a folder. What
a source has and cannot offer (a dangling link, a distribution with another licence) is listed with its
reason.

Knows nothing of languages or texts. Fails with UserError where a source is missing or empty.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.metadata
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from lakh.corpus.document import LISTING
from lakh.corpus.licences import judge
from lakh.errors import UserError

__all__ = ["Fingerprint", "Folder", "Listed", "Packages", "Source", "Stdlib", "batches", "open_sources"]

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "ensurepip"})
INSTALLED = "installed:"
BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Listed:
    """One file that a source offers, or why it cannot; the fields of LISTING in their order."""

    repo: str
    path: str
    licence: str
    source: str
    location: bytes
    """The path on this machine; bytes, because a file name need not be text."""
    size_bytes: int = 0
    mtime_ns: int = 0
    reason: str = ""
    detail: str = ""


class Source(Protocol):
    @property
    def name(self) -> str:
        """How reports call this source; the same on every machine."""
        ...

    def files(self) -> Iterator[Listed]: ...


@dataclass(frozen=True)
class Folder:
    """A tree of files on this machine."""

    root: Path
    """Absolute, with links resolved."""
    repo: str
    exclude: Path | None = None
    """A folder inside that is not listed: the corpus that is being written."""
    skipped: frozenset[str] = frozenset()
    licence: str = ""
    name: str = ""

    def files(self) -> Iterator[Listed]:
        yield from self._folder(str(self.root))

    def _folder(self, folder: str) -> Iterator[Listed]:
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            why = error.strerror or str(error)
            if folder == str(self.root):
                raise UserError(folder, f"cannot be listed ({why})", "check its owner and mode") from None
            yield self._problem(folder, "unreadable", f"folder: {why}")
            return
        for entry in entries:
            if entry.is_symlink():
                yield from self._link(entry)
            elif entry.is_dir(follow_symlinks=False):
                if not self._is_skipped(entry):
                    yield from self._folder(entry.path)
            else:
                yield self._file(entry)

    def _is_skipped(self, entry: os.DirEntry[str]) -> bool:
        if entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS or entry.name in self.skipped:
            return True
        return self.exclude is not None and entry.path == str(self.exclude)

    def _link(self, entry: os.DirEntry[str]) -> Iterator[Listed]:
        try:
            target = Path(entry.path).resolve(strict=True)
        except (OSError, RuntimeError) as error:  # dangling, or a loop
            yield self._problem(entry.path, "unreadable", f"link: {getattr(error, 'strerror', None) or error}")
            return
        if target.is_dir():
            if not self._is_skipped(entry):
                yield self._problem(entry.path, "symlink", "a linked folder")
        elif not target.is_relative_to(self.root):
            yield self._problem(entry.path, "symlink", "leads out of the folder")
        else:
            yield self._file(entry)

    def _file(self, entry: os.DirEntry[str]) -> Listed:
        try:
            status = entry.stat()
        except OSError as error:
            return self._problem(entry.path, "unreadable", error.strerror or str(error))
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
            return self._problem(entry.path, "unreadable", "not a regular file")
        return Listed(
            self.repo,
            self._relative(entry.path),
            self.licence,
            self.name,
            os.fsencode(entry.path),
            status.st_size,
            status.st_mtime_ns,
        )

    def _problem(self, location: str, reason: str, detail: str) -> Listed:
        return Listed(self.repo, self._relative(location), self.licence, self.name, b"", reason=reason, detail=detail)

    def _relative(self, location: str) -> str:
        return _text(location[len(str(self.root).rstrip("/")) + 1 :])


@dataclass(frozen=True)
class Stdlib:
    """The standard library of the running Python."""

    name: str = f"{INSTALLED}stdlib"

    def files(self) -> Iterator[Listed]:
        root = Path(sysconfig.get_paths()["stdlib"]).resolve()
        yield from Folder(root, "cpython", skipped=STDLIB_SKIPPED, licence="PSF-2.0", name=self.name).files()


@dataclass(frozen=True)
class Packages:
    """Installed distributions with a permissive licence; each is a repository of its own."""

    name: str = f"{INSTALLED}packages"
    search: tuple[str, ...] | None = None
    """Folders to look for distributions in; None is sys.path."""

    def files(self) -> Iterator[Listed]:
        seen = set()
        found = importlib.metadata.distributions(path=list(self.search if self.search is not None else sys.path))
        named = [(re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower(), item) for item in found]
        for repo, distribution in sorted(named, key=lambda pair: pair[0]):
            if repo and repo not in seen:  # the first on the path is the one that would be imported
                seen.add(repo)
                yield from self._distribution(repo, distribution)

    def _distribution(self, repo: str, distribution: importlib.metadata.Distribution) -> Iterator[Listed]:
        metadata = distribution.metadata
        verdict = judge(
            expression=(metadata.get_all("License-Expression") or [""])[0],
            text=(metadata.get_all("License") or [""])[0],
            classifiers=metadata.get_all("Classifier") or [],
        )
        if not verdict.permissive:
            yield Listed(repo, "", "", self.name, b"", reason="licence", detail=verdict.reason)
            return
        files = _recorded_files(distribution)
        if files is None:
            yield Listed(repo, "", "", self.name, b"", reason="unreadable", detail="the distribution lists no files")
            return
        for file in sorted(files):
            folders = file.split("/")[:-1]
            if any(part in (*SKIPPED_FOLDERS, "..") or part.endswith(".dist-info") for part in folders):
                continue
            location = str(distribution.locate_file(file))
            size, mtime = 0, 0
            with contextlib.suppress(OSError):  # the reader will meet the same error and name it
                status = os.stat(location)  # noqa: PTH116
                size, mtime = status.st_size, status.st_mtime_ns
            yield Listed(repo, _text(file), verdict.licence, self.name, os.fsencode(location), size, mtime)


def _recorded_files(distribution: importlib.metadata.Distribution) -> list[str] | None:
    """The files that a distribution says it has; None where it does not say.

    From its RECORD where there is one: since Python 3.12, `Distribution.files` leaves out what is missing on disk.
    """
    record = distribution.read_text("RECORD")
    if record is not None:
        return [row[0] for row in csv.reader(record.splitlines()) if row]
    return None if distribution.files is None else [str(file) for file in distribution.files]


def open_sources(words: Sequence[str], exclude: Path | None = None) -> list[Source]:
    """The sources that these words mean, each once, sorted by name so that their order does not matter."""
    if not words:
        raise UserError("sources", "none given", "name a folder, installed:stdlib or installed:packages")
    sources: dict[str, Source] = {}
    for word in dict.fromkeys(words):
        source = _open(word, exclude)
        other = sources.setdefault(source.name, source)
        if other != source:
            raise UserError(
                word,
                f"another source is also called {source.name.partition(':')[2]!r}",
                "name it: NEWNAME=PATH",
            )
    return [sources[name] for name in sorted(sources)]


def batches(sources: Iterable[Source]) -> Iterator[Any]:
    """The listings of all sources as record batches. Fails with UserError on a source that lists nothing."""
    for source in sources:
        rows: list[Listed] = []
        empty = True
        for listed in source.files():
            empty = False
            rows.append(listed)
            if len(rows) == BATCH_ROWS:
                yield _batch(rows)
                rows = []
        if rows:
            yield _batch(rows)
        if empty:
            raise UserError(source.name.removeprefix("folder:"), "holds no files", "choose a folder with source code")


class Fingerprint:
    """SHA-256 over names, sizes and times of a listing: changes when a file was added, removed or touched."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def watch(self, listing: Iterable[Any]) -> Iterator[Any]:
        """Hand the batches on, and take them into account."""
        for batch in listing:
            names = ("repo", "path", "size_bytes", "mtime_ns", "reason", "detail")
            for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                self._digest.update(repr(row).encode())
            yield batch

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _batch(rows: Sequence[Listed]) -> Any:
    columns = zip(*(astuple(row) for row in rows), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LISTING, strict=True)]
    return pa.record_batch(arrays, schema=LISTING)


def _open(word: str, exclude: Path | None) -> Source:
    if word.startswith(INSTALLED):
        known: dict[str, Source] = {source.name: source for source in (Stdlib(), Packages())}
        if word not in known:
            raise UserError(word, "no such source", f"choose one of: {', '.join(known)}")
        return known[word]
    name, sign, rest = word.partition("=")
    path = Path(word)
    if sign and not path.exists() and name and "/" not in name:
        path = Path(rest)
    else:
        name = path.resolve().name
    if not path.exists():
        raise UserError(str(path), "no such folder", "check the path")
    if not path.is_dir():
        raise UserError(str(path), "is a file", "give the folder that holds it")
    if exclude is not None and path.resolve() == exclude:
        raise UserError(str(path), "is both a source and the place for the corpus", "choose another --out")
    name = _text(name or "root")
    return Folder(path.resolve(), name, exclude=exclude, name=f"folder:{name}")


def _text(name: str) -> str:
    """File names need not be text; what is not becomes an escape such as \\udcff."""
    return name.encode("utf-8", "backslashreplace").decode()
