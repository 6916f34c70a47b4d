"""The files of a repository or package that state its licence, collected in any order.

licences/detect.py interprets licence files; this adds the metadata of an sdist (PKG-INFO) and of a wheel (METADATA),
which take precedence as a statement of the authors.
"""

from __future__ import annotations

import email.parser
from dataclasses import dataclass, field
from typing import ClassVar

from lakh.corpus.licences.detect import DetectedLicence, is_licence_file, repository_licence
from lakh.corpus.licences.metadata import classify_fields

__all__ = ["LicenceEvidence", "is_licence_evidence"]

METADATA = ("PKG-INFO", "METADATA")
DECLARING = frozenset(
    [
        "pyproject.toml",
        "package.json",
        "cargo.toml",
        "setup.py",
        "setup.cfg",
        "composer.json",
        "pom.xml",
        "description",
        "readme",
        "readme.md",
        "readme.rst",
        "readme.txt",
    ]
)


def is_licence_evidence(path: str) -> bool:
    """Whether a path below the top of a repository may state the licence of the whole."""
    folder, _, name = path.rpartition("/")
    if name in METADATA and (not folder or folder.endswith((".dist-info", ".egg-info"))):
        return True
    return is_licence_file(path) or (not folder and (name.lower() in DECLARING or name.endswith(".gemspec")))


@dataclass
class LicenceEvidence:
    MAX_BYTES: ClassVar[int] = 200_000

    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, path: str, content: bytes) -> None:
        if len(content) <= self.MAX_BYTES and b"\0" not in content:
            self.files[path] = content

    def classify(self) -> DetectedLicence:
        for path in sorted(self.files):
            if path.rpartition("/")[2] in METADATA:
                fields = email.parser.HeaderParser().parsestr(self.files[path].decode("utf-8", "replace"))
                licence = classify_fields(fields).licence
                if licence:
                    return DetectedLicence(licence, path)
        return repository_licence(self.files)
