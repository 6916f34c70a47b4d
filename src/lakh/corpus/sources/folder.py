"""A tree of files on this machine, listed in sorted order.

Hidden folders, __pycache__ and node_modules are skipped; links are never followed out of the tree. Entries that cannot
be read (a dangling link, a pipe) are listed with their reason.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lakh.corpus.licences.detect import DetectedLicence
from lakh.corpus.sources.licence_evidence import LicenceEvidence, is_licence_evidence
from lakh.corpus.sources.listing import ListedFile, as_text
from lakh.errors import UserError

__all__ = ["SKIPPED_FOLDERS", "Folder"]

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
        """The licence that the folder's own files state."""
        evidence = LicenceEvidence()
        with contextlib.suppress(OSError), os.scandir(self.root) as entries:
            for entry in entries:
                if is_licence_evidence(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError), Path(entry.path).open("rb") as file:
                        evidence.add(entry.name, file.read(LicenceEvidence.MAX_BYTES + 1))
        return evidence.classify()

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
