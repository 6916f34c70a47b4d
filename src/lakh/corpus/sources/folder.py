"""A tree of files on this machine, listed in sorted order.

Hidden folders, __pycache__ and node_modules are skipped; links are never followed out of the tree. Entries that cannot
be read (a dangling link, a pipe) are listed with their reason. The licence is the one that the folder states, or else
the repository around it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lakh.corpus.licences.detect import DetectedLicence, is_licence_file
from lakh.corpus.sources.licence_evidence import LicenceEvidence, is_licence_evidence
from lakh.corpus.sources.listing import ListedFile, as_text
from lakh.errors import UserError

__all__ = ["SKIPPED_FOLDERS", "Folder"]

VERSION_CONTROL = (".git", ".hg")
PROJECT_FILES = ("pyproject.toml", "package.json", "Cargo.toml", "go.mod", "pom.xml")
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True)
class Folder:
    """A tree of files on this machine."""

    root: Path
    """Absolute, with links resolved."""
    repo: str
    exclude: Path | None = None
    """A folder inside that is not listed: the corpus being written."""
    skipped: frozenset[str] = frozenset()
    licence: str = ""
    name: str = ""
    kind: str = "file"
    """Kind of every file: file (code) or docs."""

    def files(self) -> Iterator[ListedFile]:
        found = DetectedLicence(self.licence, "") if self.licence else self._evidence()
        for listed in self._folder(str(self.root)):
            yield replace(listed, licence=found.expression, licence_evidence=found.evidence, kind=self.kind)

    def _evidence(self) -> DetectedLicence:
        """The licence that the folder's own files state, or else those of the repository around it."""
        found = _evidence_in(self.root)
        above = ""
        for folder in _enclosing_repository(self.root):
            if found.expression:
                break
            above += "../"
            outer = _evidence_in(folder)
            if outer.expression:
                found = DetectedLicence(outer.expression, above + outer.evidence)
        return found

    def _folder(self, folder: str) -> Iterator[ListedFile]:
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

    def _link(self, entry: os.DirEntry[str]) -> Iterator[ListedFile]:
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

    def _file(self, entry: os.DirEntry[str]) -> ListedFile:
        try:
            status = entry.stat()
        except OSError as error:
            return self._problem(entry.path, "unreadable", error.strerror or str(error))
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            return self._problem(entry.path, "unreadable", "not a regular file")
        location, size, mtime = os.fsencode(entry.path), status.st_size, status.st_mtime_ns
        return ListedFile(self.repo, self._relative(entry.path), "", self.name, location, size, mtime)

    def _problem(self, location: str, reason: str, detail: str) -> ListedFile:
        return ListedFile(self.repo, self._relative(location), "", self.name, reason=reason, detail=detail)

    def _relative(self, location: str) -> str:
        return as_text(location[len(str(self.root).rstrip("/")) + 1 :])


def _evidence_in(root: Path) -> DetectedLicence:
    """The licence that the files at the top of a folder, and in folders such as LICENSES and docs, state."""
    evidence = LicenceEvidence()
    for folder in _folders_of_licences(root):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = str(Path(entry.path).relative_to(root))
                if is_licence_evidence(path) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError), Path(entry.path).open("rb") as file:
                        evidence.add(path, file.read(LicenceEvidence.MAX_BYTES + 1))
    return evidence.classify()


def _folders_of_licences(root: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return [root, *(root / name for name in names if is_licence_file(f"{name}/LICENSE"))]
    return [root]


def _enclosing_repository(root: Path) -> list[Path]:
    """The folders above `root` up to the top of its repository, from inside out; none if it is in no repository."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises without a home folder
    for markers in (VERSION_CONTROL, PROJECT_FILES):
        for number, folder in enumerate([root, *root.parents]):
            if folder == home or folder == folder.parent:
                break
            if any((folder / name).exists() for name in markers):
                return list(root.parents[:number])
    return []
