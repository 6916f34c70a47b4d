"""What a repository or package says of its licence: the files at its top that speak of it, gathered in any order.

Which files those are and what they say is licence_files.py's to know; here is only what a package adds: the metadata
of an sdist (PKG-INFO) and of a wheel (METADATA), a statement of its authors that goes first.
"""

from __future__ import annotations

import email.parser
from dataclasses import dataclass, field
from typing import ClassVar

from lakh.corpus.licences.detect import DetectedLicence, is_licence_file, repository_licence
from lakh.corpus.licences.metadata import judge

__all__ = ["LicenceEvidence", "is_licence_evidence"]

METADATA = ("PKG-INFO", "METADATA")
DECLARING = frozenset(
    {"pyproject.toml", "package.json", "cargo.toml", "readme", "readme.md", "readme.rst", "readme.txt"}
)


def is_licence_evidence(path: str) -> bool:
    """Could this file, by its place below the top of a repository, say what the licence of the whole is?"""
    folder, _, name = path.rpartition("/")
    if name in METADATA and (not folder or folder.endswith((".dist-info", ".egg-info"))):
        return True
    return is_licence_file(path) or (not folder and name.lower() in DECLARING)


@dataclass
class LicenceEvidence:
    MAX_BYTES: ClassVar[int] = 200_000

    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, path: str, content: bytes) -> None:
        if len(content) <= self.MAX_BYTES and b"\0" not in content:
            self.files[path] = content

    def judge(self) -> DetectedLicence:
        for path in sorted(self.files):
            if path.rpartition("/")[2] in METADATA:
                licence = _from_metadata(self.files[path].decode("utf-8", "replace"))
                if licence:
                    return DetectedLicence(licence, path)
        return repository_licence(self.files)


def _from_metadata(text: str) -> str:
    fields = email.parser.HeaderParser().parsestr(text)
    verdict = judge(
        expression=fields.get("License-Expression", ""),
        text=fields.get("License", ""),
        classifiers=fields.get_all("Classifier") or [],
    )
    return verdict.licence
