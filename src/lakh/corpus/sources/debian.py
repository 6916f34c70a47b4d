"""Debian sources, from the mirrors that apt uses on this machine; needs no root.

    download("hello", folder)            # the newest version; hello_2.10.orig.tar.gz
    download("hello=2.10-3", folder)     # that version

`apt-get source` reads the lists of all packages again for each name, a second of work; here they are read once, so
thousands of packages take minutes (apt's own helper unpacks lists and fetches files, so proxies, credentials and
mirrors are apt's). The lists are cached and renewed when older than LISTS_MAX_AGE_S. Debian's changes (*.debian.tar)
are patches and packaging, not the program, and are skipped. apt checks the lists' signatures; they contain each file's
SHA-256.

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
from lakh.corpus.sources.command import run_command as run
from lakh.errors import PeerLost, UserError

__all__ = ["DebianRelease", "download", "newest", "releases"]

LISTS_MAX_AGE_S = 7 * 86400.0
LISTS = "debian: apt's lists"
HELPER = "/usr/lib/apt/apt-helper"
_lists_lock = threading.Lock()


@dataclass(frozen=True)
class DebianRelease:
    """One version of a source package: the URL of its archives, and their (name, SHA-256)."""

    name: str
    version: str
    base: str
    archives: tuple[tuple[str, str], ...]


def download(package: str, folder: Path) -> None:
    """Download the archives of NAME or NAME=VERSION to the folder."""
    where, (name, _, version) = f"debian:{package}", package.partition("=")
    with _lists_lock:
        known = _table(_folder())
    found = [release for release in known.get(name, ()) if not version or release.version == version]
    if not found:
        versions = ", ".join(sorted(release.version for release in known.get(name, ())))
        todo = (
            f"its versions here: {versions}"
            if versions
            else "check the name: a source package may differ from its binary packages"
        )
        raise UserError(where, "no such source package or version in apt's lists", todo)
    release = newest(found)
    for file, sha256 in release.archives:
        fetch = [HELPER, "-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=3", "download-file"]
        fetch += [f"{release.base}/{file}", str(folder / file), f"SHA256:{sha256}"]
        try:
            run(fetch, where, "apt", todo="try again", failure=PeerLost, prefer="Failed to fetch")
        except PeerLost as error:
            if "404" not in error.found.split():
                raise
            raise UserError(where, f"the mirror has no {file}", "choose another mirror or version") from None


def releases(text: str, mirror: str) -> Iterable[DebianRelease]:
    """The source packages with archives in one list (Debian policy 5.4 and its Sources files)."""
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
        if "Extra-Source-Only: yes" in stanza:  # kept only to fulfil a licence, not a release
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
    """The newest by Debian's order of versions, from dpkg; called only if there are several."""

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
    """All releases of the lists by name: some million lines, read once."""
    _renew(apt)
    asked = ["apt-get", *_options(apt), "indextargets", "--format", "$(REPO_URI) $(FILENAME)", "Created-By: Sources"]
    table: dict[str, list[DebianRelease]] = {}
    for line in run(asked, LISTS, "apt").splitlines():
        mirror, _, file = line.partition(" ")
        for release in releases(run([HELPER, "cat-file", file], LISTS, "apt"), mirror):
            table.setdefault(release.name, []).append(release)
    return table


def _renew(apt: Path) -> None:
    """Fetch the source lists of apt's mirrors if they are missing, old, or of other mirrors."""
    asked = ["apt-get", "indextargets", "--format", "deb-src $(REPO_URI) $(CODENAME) $(COMPONENT)"]
    mirrors = run([*asked, "Created-By: Packages"], LISTS, "apt", todo="run apt-get update as root once")
    if not mirrors.strip():
        raise UserError(LISTS, "apt has no mirror", "run apt-get update as root once")
    wanted = "\n".join(sorted(set(mirrors.splitlines()))) + "\n"
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
