"""Installed Python packages that programs in a sandbox may import: those that the user names, and what they require.

Nothing else of the environment becomes visible, because some packages bring the answers of benchmarks. A package with
files of a benchmark is refused.
"""

from __future__ import annotations

import importlib.metadata
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lakh.errors import UserError

__all__ = ["SandboxPackages", "find"]

_BENCHMARK = re.compile(
    r"human[-_]?eval|mbpp|mbxp|mxeval|cruxeval|livecodebench|bigcodebench|multipl[-_]?e|evalplus", re.I
)
_DATA = (".gz", ".json", ".jsonl", ".parquet", ".zip", ".zst")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_MODULE = re.compile(r"([A-Za-z]\w*)(?:\.py|\.cpython-[\w-]+\.so|\.abi3\.so)?")


@dataclass(frozen=True)
class SandboxPackages:
    names: tuple[str, ...]
    """As the user gave them."""
    versions: tuple[str, ...]
    """Name and version of each of these, for the result."""
    modules: tuple[str, ...]
    """Top-level modules of these: imported when a worker starts, so that no program pays for that."""
    entries: tuple[Path, ...]
    """Files and folders of the environment, those of required packages included."""

    def linked(self) -> str:
        """A new folder with a link to each entry: in the environment's own folder, Python would find all packages."""
        folder = tempfile.mkdtemp(prefix="lakh-eval-packages-")
        Path(folder).chmod(0o755)  # programs may run under another uid
        for entry in self.entries:
            (Path(folder) / entry.name).symlink_to(entry)
        return folder

    def __str__(self) -> str:
        return " ".join(self.versions)


def find(names: Sequence[str]) -> SandboxPackages:
    """The packages of these names in lakh's own environment. UserError for one that is missing or has answers."""
    chosen = [_distribution(name) for name in names]
    entries: dict[Path, None] = {}
    for one in _with_requirements(chosen):
        _refuse_answers(one)
        entries |= dict.fromkeys(_entries(one))
    return SandboxPackages(
        names=tuple(_normal(name) for name in names),
        versions=tuple(f"{one.metadata['Name']}=={one.version}" for one in chosen),
        modules=tuple(dict.fromkeys(module for one in chosen for module in _modules(_entries(one)))),
        entries=tuple(entries),
    )


def _distribution(name: str) -> importlib.metadata.Distribution:
    todo = "install it beside lakh, or correct the name (as in pip list)"
    if not _NAME.fullmatch(name):
        raise UserError(f"--packages {name}", "is not the name of a package", todo)
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"--packages {name}", "no such package is installed", todo) from None


def _with_requirements(chosen: Iterable[importlib.metadata.Distribution]) -> list[importlib.metadata.Distribution]:
    """These and what they require, without extras. A requirement that is not installed is one of another platform."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(chosen)
    while waiting:
        one = waiting.pop()
        name = _normal(one.metadata["Name"])
        if name in found:
            continue
        found[name] = one
        for requirement in one.requires or ():
            match = _NAME.match(requirement)
            if match and "extra ==" not in requirement.partition(";")[2]:
                try:
                    waiting.append(importlib.metadata.distribution(match[0]))
                except importlib.metadata.PackageNotFoundError:
                    continue
    return list(found.values())


def _refuse_answers(one: importlib.metadata.Distribution) -> None:
    name = one.metadata["Name"]
    todo = "name the packages that programs need, without those of benchmarks"
    if _BENCHMARK.search(name):
        raise UserError(f"--packages {name}", "is a package of a benchmark", todo)
    for file in one.files or ():
        if file.name.endswith(_DATA) and _BENCHMARK.search(file.name):
            raise UserError(f"--packages {name}", f"holds {file}, which may have a benchmark's answers", todo)


def _entries(one: importlib.metadata.Distribution) -> list[Path]:
    """Its top-level files and folders; scripts outside the environment's folder of packages are left out."""
    names = {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__", "/")}
    paths = [Path(str(one.locate_file(name))) for name in sorted(names)]
    return [path for path in paths if path.exists() and path.suffix != ".pth"]


def _modules(entries: Iterable[Path]) -> list[str]:
    found = []
    for entry in entries:
        match = _MODULE.fullmatch(entry.name)
        if match and (entry.is_file() or (entry / "__init__.py").is_file()):
            found.append(match[1])
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
