"""Packages by name, and git repositories: fetched once with standard tools, kept in a cache.

    pypi:NAME[==VERSION]      the sdist (else the wheel) from the index that pip is configured to use
    npm:NAME[@VERSION]        npm pack
    debian:NAME[=VERSION]     its source archives, from the mirrors that apt uses on this machine (debian.py)
    git:PATH_OR_URL[@REV]     the files of one commit, default HEAD: git archive, after git clone for a URL

`pip download` is not used: to get an sdist's metadata it runs the package's own build code, and lakh never runs code of
a source. The simple API of an index gives the same file with its hash. The cache is $XDG_CACHE_HOME/lakh/sources;
cached packages are not fetched again.

Fails with UserError (no such package, a missing tool) and PeerLost (the network); every command has a time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.corpus.sources import archives, debian
from lakh.corpus.sources.command import run_command as run
from lakh.corpus.sources.container_file import ContainerFile
from lakh.corpus.sources.listing import ListedFile
from lakh.errors import DataError, UserError

__all__ = ["KINDS", "PackageSource", "fetch", "fetch_url"]

CACHE = "sources"
KINDS = ("pypi:", "npm:", "debian:", "git:")
REQUEST_TIMEOUT_S = 60.0
NAME = re.compile(r"@?[A-Za-z0-9][A-Za-z0-9._+/~-]*")
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
_pip_lock = threading.Lock()


@dataclass(frozen=True)
class PackageSource:
    """A package or commit, fetched when it is first listed."""

    argument: str
    repo: str
    name: str
    missing: str = ""
    """Why it could not be fetched; listed as a row with that reason (fetching.py)."""

    @staticmethod
    def open(argument: str) -> PackageSource:
        kind, _, rest = argument.partition(":")
        package = re.split(r"==|=|(?<=.)@", rest, maxsplit=1)[0]
        if kind != "git" and not NAME.fullmatch(package):
            raise UserError(argument, "is not a package name", f"write {kind}:NAME")
        repo = package.rstrip("/").removesuffix(".git").rpartition("/")[2] if kind == "git" else package
        return PackageSource(argument, repo, argument)

    def files(self) -> Iterator[ListedFile]:
        if self.missing:
            yield ListedFile(self.repo, "", "", self.name, reason="missing", detail=self.missing)
            return
        for path in fetch(self.argument):
            yield from ContainerFile(str(path), self.repo, "archive", self.name).files()


def fetch(argument: str) -> list[Path]:
    """The archives of a package or commit, from the cache or from its index."""
    kind, _, rest = argument.partition(":")
    folder = storage.cache_folder(CACHE) / kind / hashlib.sha256(rest.encode()).hexdigest()[:16]
    if not (folder / "complete").exists() or kind == "git":  # look a commit up again: HEAD moves
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A unique name: another build may be fetching the same package.
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent) as partial:
            {"pypi": _pypi, "npm": _npm, "debian": debian.download, "git": _git}[kind](rest, Path(partial))
            (Path(partial) / "complete").touch()
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another build was faster, with the same files
                Path(partial).rename(folder)
            Path(partial).mkdir(exist_ok=True)
    found = sorted(path for path in folder.iterdir() if archives.kind_of(path.name))
    if not found:
        raise UserError(argument, "has no source archive", "choose another version")
    return found


def fetch_url(url: str, target: Path, sha256: str = "") -> None:
    """Download one file atomically and check its hash."""

    def get() -> None:
        digest = hashlib.sha256()
        with urllib.request.urlopen(url, timeout=REQUEST_TIMEOUT_S) as answer, storage.create(target) as file:
            while block := answer.read(1 << 20):
                digest.update(block)
                file.write(block)
        if sha256 and digest.hexdigest() != sha256:
            target.unlink()
            raise DataError(url, f"has the SHA-256 {digest.hexdigest()}", f"expected {sha256}: do not use it")

    storage.retry(get, f"fetch {url}")


def _pypi(rest: str, folder: Path) -> None:
    package, _, version = rest.partition("==")
    index = _index_url()
    normal = re.sub(r"[-_.]+", "-", package).lower()
    chosen = _choose(_index_files(f"{index}/{normal}/", f"pypi:{rest}"), normal, version)
    if chosen is None:
        raise UserError(
            f"pypi:{rest}", "has no such version, or no file that can be read", "see the index for its versions"
        )
    url = urllib.parse.urljoin(f"{index}/{normal}/", chosen["url"])
    fetch_url(url, folder / chosen["filename"], chosen.get("hashes", {}).get("sha256", ""))


def _index_url() -> str:
    """pip's index: from its environment variable, its configuration, or its default."""
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"].rstrip("/")
    with _pip_lock:
        return _pip_index_url()


@lru_cache(maxsize=1)
def _pip_index_url() -> str:
    """Cached, because pip takes a second to start."""
    default = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    for arguments in (["-m", "pip", "config", "get", "global.index-url"], ["-c", default]):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().rstrip("/")
    raise UserError("pypi:", "this Python has no pip to read the index from", "set PIP_INDEX_URL to a simple index")


def _choose(files: Sequence[dict[str, Any]], package: str, version: str) -> dict[str, Any] | None:
    """The sdist of that version (default: the newest), else its wheel."""
    by_version: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        name = file["filename"]
        if file.get("yanked") or not archives.kind_of(name):
            continue
        if name.endswith(".whl") and not name.endswith("-none-any.whl"):
            continue  # built for one platform: compiled code
        stem = archives.stem_of(name)
        parts = stem.split("-")
        found = parts[1] if name.endswith(".whl") else stem[len(package) + 1 :]
        by_version.setdefault(found, []).append(file)
    stable = [item for item in by_version if re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", item)]
    key = version or max(
        stable or by_version, key=lambda item: [int(part) for part in re.findall(r"\d+", item)], default=""
    )
    ranked = sorted(by_version.get(key, []), key=lambda file: (file["filename"].endswith(".whl"), file["filename"]))
    return ranked[0] if ranked else None


def _npm(rest: str, folder: Path) -> None:
    run(["npm", "pack", rest, "--pack-destination", str(folder), "--silent"], f"npm:{rest}", "npm")


def _git(rest: str, folder: Path) -> None:
    where, sign, revision = rest.rpartition("@")
    if not sign or "/" in revision or ":" in revision:  # in git@host:path the @ is not a revision
        where, revision = rest, "HEAD"
    checkout = Path(where)
    if not checkout.exists():
        checkout = folder / "clone"
        clone = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", where, str(checkout)]
        run(clone, f"git:{rest}", "git", todo="check the URL")
    name = f"{where.rstrip('/').removesuffix('.git').rpartition('/')[2] or 'repository'}.tar"
    archive = ["git", "-C", str(checkout), "archive", "--format=tar", f"--output={(folder / name).resolve()}", revision]
    run(archive, f"git:{rest}", "git", todo="check the path and the revision")
    shutil.rmtree(folder / "clone", ignore_errors=True)


def _index_files(url: str, where: str) -> list[dict[str, Any]]:
    """The files on a package's page of a simple index, in its JSON form or its HTML form."""

    def get() -> tuple[str, bytes]:
        request = urllib.request.Request(url, headers={"Accept": f"{SIMPLE_JSON}, text/html;q=0.1"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise UserError(where, "no such package", "check the name") from None
            raise

    kind, body = storage.retry(get, f"ask {url}")
    if kind.endswith("json"):
        files = json.loads(body).get("files", [])
        return [file for file in files if isinstance(file, dict)]
    found = []
    for link in re.findall(r"""<a\s[^>]*href\s*=\s*["']([^"']+)""", body.decode("utf-8", "replace")):
        address, _, digest = html.unescape(link).partition("#sha256=")
        name = urllib.parse.unquote(address.rpartition("/")[2])
        found.append({"filename": name, "url": address, "hashes": {"sha256": digest}})
    return found
