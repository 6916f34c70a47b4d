"""Code installed beside the running Python: its standard library and its distributions.

installed:stdlib     the standard library (PSF-2.0), without its tests
installed:packages   distributions whose metadata names a permissive licence, each as one repository
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lakh.corpus.licences.metadata import classify_fields
from lakh.corpus.sources.folder import SKIPPED_FOLDERS, Folder
from lakh.corpus.sources.listing import ListedFile, as_text

__all__ = ["INSTALLED", "InstalledPackages", "Stdlib"]

STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "ensurepip"})
INSTALLED = "installed:"


@dataclass(frozen=True)
class Stdlib:
    """The standard library of the running Python."""

    name: str = f"{INSTALLED}stdlib"

    def files(self) -> Iterator[ListedFile]:
        root = Path(sysconfig.get_paths()["stdlib"]).resolve()
        yield from Folder(root, "cpython", skipped=STDLIB_SKIPPED, licence="PSF-2.0", name=self.name).files()


@dataclass(frozen=True)
class InstalledPackages:
    """Installed distributions with a permissive licence, each as one repository."""

    name: str = f"{INSTALLED}packages"
    search: tuple[str, ...] | None = None
    """Folders to search for distributions; None is sys.path."""

    def files(self) -> Iterator[ListedFile]:
        seen = set()
        found = importlib.metadata.distributions(path=list(self.search if self.search is not None else sys.path))
        named = [(re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower(), item) for item in found]
        for repo, distribution in sorted(named, key=lambda pair: pair[0]):
            if repo and repo not in seen:  # the first on the path is the one that is imported
                seen.add(repo)
                yield from self._distribution(repo, distribution)

    def _distribution(self, repo: str, distribution: importlib.metadata.Distribution) -> Iterator[ListedFile]:
        decision = classify_fields(distribution.metadata)
        if not decision.permissive:
            yield ListedFile(repo, "", "", self.name, reason="licence", detail=decision.reason)
            return
        files = _recorded_files(distribution)
        if files is None:
            yield ListedFile(repo, "", "", self.name, reason="unreadable", detail="the distribution lists no files")
            return
        for file in sorted(files):
            folders = file.split("/")[:-1]
            if any(part in (*SKIPPED_FOLDERS, "..") or part.endswith(".dist-info") for part in folders):
                continue
            location = str(distribution.locate_file(file))
            size, mtime = 0, 0
            with contextlib.suppress(OSError):  # the reader reports the same error
                status = os.stat(location)  # noqa: PTH116
                size, mtime = status.st_size, status.st_mtime_ns
            yield ListedFile(repo, as_text(file), decision.licence, self.name, os.fsencode(location), size, mtime)


def _recorded_files(distribution: importlib.metadata.Distribution) -> list[str] | None:
    """The files that a distribution lists, from its RECORD; None without a list.

    Since Python 3.12, `Distribution.files` omits files that are missing on disk.
    """
    record = distribution.read_text("RECORD")
    if record is not None:
        return [row[0] for row in csv.reader(record.splitlines()) if row]
    return None if distribution.files is None else [str(file) for file in distribution.files]
