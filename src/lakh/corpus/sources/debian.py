"""Debian sources, from the mirrors that this machine's apt uses; no root, and thousands of packages in minutes.

    download("hello", folder)            # the newest version; hello_2.10.orig.tar.gz
    download("hello=2.10-3", folder)     # that one

`apt-get source` reads the lists of all packages again for each name, a second of work; here they are read once (apt's
own helper unpacks them and fetches files, so proxies, credentials and mirrors are apt's). The lists live in a folder of
ours and are renewed when older than LISTS_MAX_AGE_S. Debian's changes (*.debian.tar) are patches and packaging, not the
program: left out. The lists are signed, apt checks that; each file's SHA-256 is in them.

Fails with UserError (no such package or version, a mirror without the file, no apt) and PeerLost (the network).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cmp_to_key, lru_cache
from pathlib import Path

from lakh import storage
from lakh.corpus.sources import archives
from lakh.corpus.sources.command import run
from lakh.errors import PeerLost, UserError

__all__ = ["DebianRelease", "download", "newest", "releases"]

LISTS_MAX_AGE_S = 7 * 86400.0
LISTS = "debian: apt's lists"
HELPER = "/usr/lib/apt/apt-helper"
_one_reads_lists = threading.Lock()


@dataclass(frozen=True)
class DebianRelease:
    """One version of a source package: where its archives are, and their SHA-256 by name."""

    name: str
    version: str
    base: str
    archives: tuple[tuple[str, str], ...]


def download(word: str, folder: Path) -> None:
    """The archives of NAME or NAME=VERSION, into the folder."""
    where, (name, _, version) = f"debian:{word}", word.partition("=")
    with _one_reads_lists:
        known = _table(_folder())
    found = [release for release in known.get(name, ()) if not version or release.version == version]
    if not found:
        versions = ", ".join(sorted(release.version for release in known.get(name, ())))
        todo = f"its versions here: {versions}" if versions else "check the name: sources and packages are named apart"
        raise UserError(where, "no such source package or version in apt's lists", todo)
    release = newest(found)
    for file, sha256 in release.archives:
        fetch = [HELPER, "-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=3", "download-file"]
        fetch += [f"{release.base}/{file}", str(folder / file), f"SHA256:{sha256}"]
        try:
            run(fetch, where, "apt", todo="try again", failure=PeerLost, telling="Failed to fetch")
        except PeerLost as error:
            if "404" not in error.found.split():
                raise
            raise UserError(where, f"the mirror has no {file}", "choose another mirror or version") from None


def releases(text: str, mirror: str) -> Iterable[DebianRelease]:
    """The source packages of one list (Debian policy 5.4 and its Sources files); what has no archive is left out."""
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                fields[key] += line + "\n"
            else:
                key, _, value = line.partition(":")
                fields[key] = value.strip() + "\n"
        if not {"Package", "Version", "Directory", "Checksums-Sha256"} <= fields.keys():
            continue
        if "Extra-Source-Only: yes" in stanza:  # kept for a licence's sake only, no release of its own
            continue
        listed = [line.split() for line in fields["Checksums-Sha256"].splitlines() if line.strip()]
        kept = tuple(
            (parts[2], parts[0])
            for parts in listed
            if len(parts) == 3 and archives.kind_of(parts[2]) and ".debian.tar" not in parts[2] and "/" not in parts[2]
        )
        if kept:
            base = f"{mirror.rstrip('/')}/{fields['Directory'].strip()}"
            yield DebianRelease(fields["Package"].strip(), fields["Version"].strip(), base, kept)


def newest(found: list[DebianRelease]) -> DebianRelease:
    """By Debian's order of versions, which dpkg knows; asked only where there are several."""

    def order(one: DebianRelease, other: DebianRelease) -> int:
        if one.version == other.version:
            return 0
        try:
            run(["dpkg", "--compare-versions", one.version, "lt", other.version], f"debian:{one.name}", "dpkg")
        except UserError:
            return 1
        return -1

    return max(found, key=cmp_to_key(order))


def _folder() -> Path:
    return storage.cache_folder("sources") / "apt"


def _options(apt: Path) -> list[str]:
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "-", "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt, "APT::Sandbox::User": "",
    }  # fmt: skip
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


@lru_cache(maxsize=1)
def _table(apt: Path) -> dict[str, list[DebianRelease]]:
    """Every release of the lists by name: some million lines, read once."""
    _renew(apt)
    asked = ["apt-get", *_options(apt), "indextargets", "--format", "$(REPO_URI) $(FILENAME)", "Created-By: Sources"]
    table: dict[str, list[DebianRelease]] = {}
    for line in run(asked, LISTS, "apt").splitlines():
        mirror, _, file = line.partition(" ")
        for release in releases(run([HELPER, "cat-file", file], LISTS, "apt"), mirror):
            table.setdefault(release.name, []).append(release)
    return table


def _renew(apt: Path) -> None:
    """Source lists of the mirrors that apt knows now, fetched where they are missing, old, or of other mirrors."""
    asked = ["apt-get", "indextargets", "--format", "deb-src $(REPO_URI) $(CODENAME) $(COMPONENT)"]
    told = run([*asked, "Created-By: Packages"], LISTS, "apt", todo="run apt-get update as root once")
    if not told.strip():
        raise UserError(LISTS, "apt knows no mirror", "run apt-get update as root once")
    wanted = "\n".join(sorted(set(told.splitlines()))) + "\n"
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    stamp = apt / "sources.list"
    if stamp.exists() and stamp.read_text() == wanted and time.time() - stamp.stat().st_mtime < LISTS_MAX_AGE_S:
        return
    stamp.write_text(wanted)
    try:
        run(["apt-get", *_options(apt), "update", "-qq"], LISTS, "apt", todo="check the network", failure=PeerLost)
    except BaseException:
        stamp.unlink()
        raise
