"""Where raw code comes from: the SRC arguments of `lakh corpus build SRC...` as listings.

    PATH                      a folder or a git working tree; its name is the repository's name
    NAME=PATH                 the same under another name; also for files
    FILE                      an archive (tar, zip, whl), .jsonl(.gz), .parquet: a path or a URL
    .../Posts.xml             a Stack Exchange dump: questions with their answers
    own:SRC                   one of these, as your own code: taken whatever the licence of the repository
    docs:PATH                 a folder of documentation: Markdown, reStructuredText, HTML
    synthetic:FILE            JSON lines or Parquet whose records state their origin
    git:PATH_OR_URL[@REV]     the files of one commit
    pypi:NAME[==VERSION]  npm:NAME[@VERSION]  debian:NAME[=VERSION]      a package by its name
    installed:stdlib          the standard library of the running Python
    installed:packages        installed distributions with a permissive licence
    @FILE                     more arguments in a file, one a line; # begins a comment

A listing opens no file (except licence files at a folder's root). Listings: listing.py (the types), folder.py,
installed.py, container_file.py, packages.py and fetching.py. Reading: readers.py and what it imports. Fails with
UserError if a source is missing or empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lakh import storage
from lakh.corpus.document import Progress
from lakh.corpus.licences.detect import OWN
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
    "fetch_packages",
    "open_sources",
]

DOCS, SYNTHETIC, OWN_CODE = "docs:", "synthetic:", "own:"


def open_sources(arguments: Sequence[str], exclude: Path | None = None) -> list[CorpusSource]:
    """The sources of these arguments, each once, sorted by name so that their order does not matter."""
    if not arguments:
        raise UserError("sources", "none given", "name a folder, installed:stdlib or installed:packages")
    sources: dict[str, CorpusSource] = {}
    for argument in dict.fromkeys(_expanded(arguments)):
        source = _open(argument, exclude)
        other = sources.setdefault(source.name, source)
        if other != source:
            found = f"another source is also called {source.name.partition(':')[2]!r}"
            raise UserError(argument, found, "name it: NEWNAME=PATH")
    return _with_distinct_names([sources[name] for name in sorted(sources)])


@dataclass(frozen=True)
class FetchedPackages:
    num_packages: int
    missing: dict[str, str]
    """Argument -> reason."""
    size_bytes: int


def fetch_packages(
    arguments: Sequence[str], *, skip_missing: bool = False, progress: Progress | None = None
) -> FetchedPackages:
    """Fetch the packages and repositories of these arguments into the cache, ahead of a build."""
    opened = fetch_all(open_sources(arguments), skip_missing=skip_missing, progress=progress)
    packages = [source for source in opened if isinstance(source, PackageSource)]
    if not packages:
        found = "names no package or repository"
        raise UserError(" ".join(arguments), found, "give pypi:, npm:, debian: or git: sources")
    missing = {source.argument: source.missing for source in packages if source.missing}
    size = sum(listed.size_bytes for source in packages for listed in source.files())
    return FetchedPackages(len(packages) - len(missing), missing, size)


def _expanded(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with @FILE replaced by the lines of the file."""
    for argument in arguments:
        if not argument.startswith("@"):
            yield argument
            continue
        text = storage.read_bytes(argument[1:]).decode("utf-8", "replace")
        listed = [line.partition("#")[0].strip() for line in text.splitlines()]
        if not any(listed):
            raise UserError(argument, "names no source", "write one a line")
        yield from filter(None, listed)


def _with_distinct_names(sources: Sequence[CorpusSource]) -> list[CorpusSource]:
    """Add kind and version to the names of packages that occur in two indexes or versions."""
    number = Counter(source.repo for source in sources if isinstance(source, PackageSource))
    return [
        replace(source, repo=re.sub(r"[:=@]+", "-", source.argument))
        if isinstance(source, PackageSource) and number[source.repo] > 1
        else source
        for source in sources
    ]


def _open(argument: str, exclude: Path | None) -> CorpusSource:
    if argument.startswith(INSTALLED):
        known: dict[str, CorpusSource] = {source.name: source for source in (Stdlib(), InstalledPackages())}
        if argument not in known:
            raise UserError(argument, "no such source", f"choose one of: {', '.join(known)}")
        return known[argument]
    if argument.startswith(KINDS):
        return PackageSource.open(argument)
    given, licence = argument, OWN if argument.startswith((OWN_CODE, SYNTHETIC)) else ""
    argument = argument.removeprefix(OWN_CODE)
    prefix = next((item for item in (DOCS, SYNTHETIC) if argument.startswith(item)), "")
    name, path = _name_and_path(argument.removeprefix(prefix))
    if not path:
        raise UserError(given, "has no path", "name a folder, for example own:src")
    if storage.is_local(path) and not Path(path).exists():
        raise UserError(path, "no such folder", "check the path")
    if not storage.is_local(path) or not Path(path).is_dir():
        return ContainerFile.open(path, as_text(name), synthetic=prefix == SYNTHETIC, licence=licence)
    if prefix == SYNTHETIC:
        raise UserError(argument, "is a folder", "give the file of records")
    root = storage.real_path(path)
    if exclude is not None and root == exclude:
        raise UserError(path, "is both a source and the place for the corpus", "choose another --out")
    name = as_text(name or "root")
    kind = "docs" if prefix == DOCS else "file"
    title = f"{'docs' if prefix else 'folder'}:{name}"
    return Folder(root, name, exclude=exclude, licence=licence, name=title, kind=kind)


def _name_and_path(argument: str) -> tuple[str, str]:
    """NAME=PATH, or a path that gives the name."""
    name, sign, rest = argument.partition("=")
    if sign and name and "/" not in name and not Path(argument).exists():
        return name, rest.removeprefix("file://")
    path = argument.removeprefix("file://")
    if not storage.is_local(path) or kind_of(path):
        own = path.rpartition("/")[2]
        return archives.stem_of(own) if archives.kind_of(own) else own.partition(".")[0], path
    return storage.real_path(path).name, path
