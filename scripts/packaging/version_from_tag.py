"""The version of a build (a metadata provider of scikit-build-core): from the git tag that is checked out.

    on the tag v0.2.0      0.2.0; an error unless lakh.__version__ is 0.2.0 too
    elsewhere in git       0.2.0.devN+gHASH, N commits after the last release tag
    in an sdist            the version of the sdist
    without git            lakh.__version__

lakh.__version__ is the next release and does not change between commits: it is part of the hashes of corpora and runs.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RELEASE_TAGS = "v[0-9]*"
GIT_TIMEOUT_S = 20


def dynamic_metadata(field: str, settings: dict[str, Any] | None = None) -> str:
    """Called by scikit-build-core."""
    if field != "version" or settings:
        raise ValueError(f"{field}: version_from_tag provides the version alone and has no settings")
    return build_version(ROOT)


def build_version(root: Path) -> str:
    declared = declared_version(root)
    sdist = root / "PKG-INFO"
    if sdist.exists() and (found := re.search(r"^Version: (\S+)$", sdist.read_text(encoding="utf-8"), re.M)):
        return found[1]
    if not (root / ".git").exists():
        return declared
    described = _git(root, "describe", "--tags", "--long", "--match", RELEASE_TAGS)
    tag, commits, commit = described.rsplit("-", 2) if described else ("", "", "")
    if commits == "0":
        if tag != f"v{declared}":
            raise ValueError(f"tag {tag}: src/lakh/__init__.py has __version__ = {declared!r}; make them equal")
        return declared
    if not tag:
        commits, commit = _git(root, "rev-list", "--count", "HEAD"), f"g{_git(root, 'rev-parse', '--short', 'HEAD')}"
    return f"{declared}.dev{commits}+{commit}" if commits else declared


def declared_version(root: Path) -> str:
    text = (root / "src" / "lakh" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    if not found:
        raise ValueError('src/lakh/__init__.py: no line __version__ = "..."')
    return found[1]


def _git(root: Path, *words: str) -> str:
    """The output of a git command; empty where git is missing, refuses the folder, or has no tag."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
