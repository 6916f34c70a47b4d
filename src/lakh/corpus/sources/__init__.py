"""Where raw code comes from: the words of `lakh corpus build SRC...` made into listings.

    PATH                      a folder or a git working tree; its name is the repository's name
    NAME=PATH                 the same under another name; of files too
    FILE                      an archive (tar, zip, whl), .jsonl(.gz), .parquet: here or behind a URL
    .../Posts.xml             a Stack Exchange dump: questions with their answers
    docs:PATH                 a folder of documentation: Markdown, reStructuredText, HTML
    synthetic:FILE            JSON lines or Parquet whose records say where they come from
    git:PATH_OR_URL[@REV]     the files of one commit
    pypi:NAME[==VERSION]  npm:NAME[@VERSION]  debian:NAME[=VERSION]      a package by its name
    installed:stdlib          the standard library of the running Python
    installed:packages        installed distributions with a permissive licence
    @FILE                     the words in a file, one a line; # begins a comment

A listing opens no file (but licence files at a folder's root). To read the package: listing.py (the vocabulary),
folder.py, installed.py, files.py, fetched.py and fetching.py (who lists), containers.py and what it imports (who
reads). Fails with UserError where a source is missing or empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lakh import storage
from lakh.corpus.sources import archives
from lakh.corpus.sources.container_file import ContainerFile, kind_of
from lakh.corpus.sources.fetching import fetch_all
from lakh.corpus.sources.folder import Folder
from lakh.corpus.sources.installed import INSTALLED, InstalledPackages, Stdlib
from lakh.corpus.sources.listing import CorpusSource, Fingerprint, ListedFile, as_text, batches
from lakh.corpus.sources.packages import KINDS, PackageSource
from lakh.errors import UserError

__all__ = [
    "CorpusSource",
    "Fingerprint",
    "Folder",
    "InstalledPackages",
    "ListedFile",
    "Stdlib",
    "batches",
    "fetch_all",
    "open_sources",
]

DOCS, SYNTHETIC = "docs:", "synthetic:"


def open_sources(words: Sequence[str], exclude: Path | None = None) -> list[CorpusSource]:
    """The sources that these words mean, each once, sorted by name so that their order does not matter."""
    if not words:
        raise UserError("sources", "none given", "name a folder, installed:stdlib or installed:packages")
    sources: dict[str, CorpusSource] = {}
    for word in dict.fromkeys(_expanded(words)):
        source = _open(word, exclude)
        other = sources.setdefault(source.name, source)
        if other != source:
            found = f"another source is also called {source.name.partition(':')[2]!r}"
            raise UserError(word, found, "name it: NEWNAME=PATH")
    return _told_apart([sources[name] for name in sorted(sources)])


def _expanded(words: Sequence[str]) -> Iterator[str]:
    """The words, and for @FILE those in the file."""
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        text = storage.read_bytes(word[1:]).decode("utf-8", "replace")
        listed = [line.partition("#")[0].strip() for line in text.splitlines()]
        if not any(listed):
            raise UserError(word, "names no source", "write one a line")
        yield from filter(None, listed)


def _told_apart(sources: Sequence[CorpusSource]) -> list[CorpusSource]:
    """Packages of one name, from two indexes or in two versions, get the kind and the version into their names."""
    number = Counter(source.repo for source in sources if isinstance(source, PackageSource))
    return [
        replace(source, repo=re.sub(r"[:=@]+", "-", source.word))
        if isinstance(source, PackageSource) and number[source.repo] > 1
        else source
        for source in sources
    ]


def _open(word: str, exclude: Path | None) -> CorpusSource:
    if word.startswith(INSTALLED):
        known: dict[str, CorpusSource] = {source.name: source for source in (Stdlib(), InstalledPackages())}
        if word not in known:
            raise UserError(word, "no such source", f"choose one of: {', '.join(known)}")
        return known[word]
    if word.startswith(KINDS):
        return PackageSource.open(word)
    prefix = next((item for item in (DOCS, SYNTHETIC) if word.startswith(item)), "")
    name, path = _name_and_path(word.removeprefix(prefix))
    if storage.is_local(path) and not Path(path).exists():
        raise UserError(path, "no such folder", "check the path")
    if not storage.is_local(path) or not Path(path).is_dir():
        return ContainerFile.open(path, as_text(name), synthetic=prefix == SYNTHETIC)
    if prefix == SYNTHETIC:
        raise UserError(word, "is a folder", "give the file of records")
    root = Path(path).resolve()
    if exclude is not None and root == exclude:
        raise UserError(path, "is both a source and the place for the corpus", "choose another --out")
    name = as_text(name or "root")
    kind = "docs" if prefix == DOCS else "file"
    return Folder(root, name, exclude=exclude, name=f"{'docs' if prefix else 'folder'}:{name}", kind=kind)


def _name_and_path(word: str) -> tuple[str, str]:
    """NAME=PATH, or a path that is its own name."""
    name, sign, rest = word.partition("=")
    if sign and name and "/" not in name and not Path(word).exists():
        return name, rest.removeprefix("file://")
    path = word.removeprefix("file://")
    if not storage.is_local(path) or kind_of(path):
        own = path.rpartition("/")[2]
        return archives.stem_of(own) if archives.kind_of(own) else own.partition(".")[0], path
    return Path(path).resolve().name, path
