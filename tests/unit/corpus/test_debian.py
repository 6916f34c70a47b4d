"""Debian sources over the real apt, from a mirror in a folder."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.corpus.sources import debian, packages
from lakh.corpus.sources.fetching import fetch_all
from lakh.errors import LakhError, PeerLost, UserError

pytestmark = pytest.mark.skipif(
    not (shutil.which("apt-get") and Path(debian.HELPER).exists()), reason="needs apt (Debian, Ubuntu)"
)


BINARY = f"Package: tool\nVersion: 1\nArchitecture: all\nFilename: pool/tool.deb\nSize: 1\nSHA256: {'0' * 64}\n"


def archive(text: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        entry = tarfile.TarInfo("tool-1/tool.py")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text.encode()))
    return made.getvalue()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three versions of `tool`, one of `gone` without its file; apt is configured to use this mirror and no other."""
    root = tmp_path / "mirror"
    pool = root / "pool/main/t/tool"
    pool.mkdir(parents=True)
    stanzas = []
    for name, version, lost in (
        ("tool", "1.9-1", False), ("tool", "1.10-1", False), ("tool", "1.10~rc1-1", False), ("gone", "1-1", True),
    ):  # fmt: skip
        upstream = version.partition("-")[0]
        files = {
            f"{name}_{upstream}.orig.tar.gz": archive(f"version = {version!r}\n"),
            f"{name}_{version}.debian.tar.gz": archive("packaging = True\n"),
            f"{name}_{version}.dsc": b"description",
        }
        for file, data in files.items():
            if not lost:
                (pool / file).write_bytes(data)
        sums = "\n".join(f" {hashlib.sha256(data).hexdigest()} {len(data)} {file}" for file, data in files.items())
        head = f"Package: {name}\nBinary: {name}\nVersion: {version}\nDirectory: pool/main/t/tool\n"
        stanzas.append(f"{head}Checksums-Sha256:\n{sums}\n")
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    release = root / "dists/stable"
    lists = {"main/source/Sources": "\n".join(stanzas), f"main/binary-{architecture}/Packages": BINARY}
    for path, text in lists.items():
        (release / path).parent.mkdir(parents=True)
        (release / path).write_text(text)
    sums = "\n".join(f" {hashlib.sha256(text.encode()).hexdigest()} {len(text)} {path}" for path, text in lists.items())
    head = f"Codename: stable\nSuite: stable\nComponents: main\nArchitectures: {architecture}\nSHA256:\n{sums}\n"
    (release / "Release").write_text(head)
    own = tmp_path / "apt"
    for name in ("lists/partial", "cache/archives/partial", "etc"):
        (own / name).mkdir(parents=True)
    (own / "sources.list").write_text(f"deb file:{root} stable main\n")
    settings = {
        "Dir::Etc::sourcelist": own / "sources.list", "Dir::Etc::sourceparts": "-", "Dir::State::lists": own / "lists",
        "Dir::Cache": own / "cache", "APT::Sandbox::User": "", "Acquire::AllowInsecureRepositories": "1",
    }  # fmt: skip
    (own / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    monkeypatch.setenv("APT_CONFIG", str(own / "apt.conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subprocess.run(["apt-get", "update", "-qq"], check=True, timeout=60, capture_output=True)
    return root


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_newest_version_in_debian_order_is_fetched_without_packaging(mirror: Path) -> None:
    assert names(packages.fetch("debian:tool")) == ["tool_1.10.orig.tar.gz"]
    assert names(packages.fetch("debian:tool=1.9-1")) == ["tool_1.9.orig.tar.gz"]


def error_of(call: Callable[[], object]) -> LakhError:
    with pytest.raises(LakhError) as caught:
        call()
    return caught.value


def test_error_names_what_the_lists_or_the_mirror_lack(mirror: Path) -> None:
    assert "1.10-1, 1.10~rc1-1, 1.9-1" in error_of(lambda: packages.fetch("debian:tool=7")).todo
    assert "source package" in error_of(lambda: packages.fetch("debian:nothing")).found
    lost = error_of(lambda: packages.fetch("debian:gone"))
    assert "gone_1.orig.tar.gz" in lost.found


def test_file_with_another_hash_is_rejected(mirror: Path) -> None:
    path = mirror / "pool/main/t/tool/tool_1.9.orig.tar.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert isinstance(error_of(lambda: packages.fetch("debian:tool=1.9-1")), (PeerLost, UserError))


def test_lists_are_read_once_for_many_packages(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    really = debian.run
    monkeypatch.setattr(
        debian, "run", lambda command, *a, **k: commands.append(command[-2]) or really(command, *a, **k)
    )
    words = ["debian:tool", "debian:tool=1.9-1", "debian:tool=1.10-1", "debian:absent"]
    debian._table.cache_clear()
    kept = fetch_all([packages.PackageSource.open(word) for word in words], skip_missing=True)
    assert [bool(source.missing) for source in kept if isinstance(source, packages.PackageSource)] == [
        False,
        False,
        False,
        True,
    ]
    assert commands.count("cat-file") == 1
