"""The files of one repository as retrieval sees them: texts of open files before those on disk, outlines cached.

Nothing outside the root is read, whatever an import or a symbolic link says. Files that are large, hidden or not UTF-8
have no definitions. Threads may share a repository.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from lakh.server.retrieval.definitions import Definition, definitions_of
from lakh.server.retrieval.imports import Import, imports_of

__all__ = ["Repository", "root_of"]

MAX_FILE_BYTES = 1 << 18
MAX_CACHED = 2_000
MAX_REEXPORTS = 3  # hops from a package's __init__ to the file that defines a name
RESOLVED_S = 10.0  # an import is looked up again after this time
MARKERS = (".git", ".hg", "pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod")
SCRIPT_EXTENSIONS = (".ts", ".tsx", ".d.ts", ".js", ".jsx", ".mjs")


def root_of(file: Path) -> Path:
    """The nearest folder above a file that has a project's marker; else the folder that holds its Python package."""
    for folder in file.parents:
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    folder = file.parent
    while (folder / "__init__.py").exists() and folder.parent != folder:
        folder = folder.parent
    return folder


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.open_texts: Mapping[Path, str] = {}
        """Of files in an editor, as they are there."""
        self._texts: dict[Path, tuple[tuple[int, int], str]] = {}
        self._definitions: dict[Path, tuple[str, list[Definition]]] = {}
        self._resolved: dict[tuple[str, Path], Path | None] = {}
        self._resolved_until_s = 0.0

    def text(self, file: Path) -> str:
        """Empty if the file cannot be used."""
        if file in self.open_texts:
            return self.open_texts[file]
        try:
            status = file.stat()
            version = status.st_mtime_ns, status.st_size
            known = self._texts.get(file)
            if known is not None and known[0] == version:
                return known[1]
            if status.st_size > MAX_FILE_BYTES or not _is_inside(file.resolve(), self.root.resolve()):
                return ""
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""
        if len(self._texts) >= MAX_CACHED:
            self._texts.clear()
            self._definitions.clear()
        self._texts[file] = version, text
        return text

    def definitions(self, file: Path) -> list[Definition]:
        text = self.text(file)
        known = self._definitions.get(file)
        if known is None or known[0] != text:
            known = self._definitions[file] = text, definitions_of(text)
        return known[1]

    def siblings(self, file: Path, limit: int) -> list[Path]:
        """Other files of the same folder and extension, the newest first."""
        found = []
        try:
            with os.scandir(file.parent) as entries:
                for entry in entries:
                    if entry.name.endswith(file.suffix) and entry.name[0] != "." and entry.is_file():
                        found.append((entry.stat().st_mtime_ns, entry.name))
        except OSError:
            return []
        names = [name for _, name in sorted(found, reverse=True) if name != file.name]
        return [file.parent / name for name in names[:limit]]

    def find(self, imported: Import, file: Path) -> list[tuple[Path, Definition]]:
        """The definitions that an import of `file` names: one, or all of a module."""
        return self._find(imported, file, MAX_REEXPORTS)

    def _find(self, imported: Import, file: Path, hops: int) -> list[tuple[Path, Definition]]:
        if imported.name and (submodule := self._resolve(_joined(imported), file)) is not None:
            return [(submodule, definition) for definition in self.definitions(submodule)]
        module = self._resolve(imported.module, file)
        if module is None:
            return []
        definitions = self.definitions(module)
        if not imported.name:
            return [(module, definition) for definition in definitions]
        found = [(module, definition) for definition in definitions if definition.name == imported.name]
        if found or not hops:
            return found[:1]
        for inner in imports_of(self.text(module), module.suffix):
            if inner.bound == imported.name and inner.name:
                return self._find(inner, module, hops - 1)
        return []

    def _resolve(self, module: str, file: Path) -> Path | None:
        """The file of a module, if the repository has it."""
        now_s = time.monotonic()
        if now_s > self._resolved_until_s:
            self._resolved = {}
            self._resolved_until_s = now_s + RESOLVED_S
        key = module, file.parent
        if key in (resolved := self._resolved):
            return resolved[key]
        found = resolved[key] = self._look_up(module, file)
        return found

    def _look_up(self, module: str, file: Path) -> Path | None:
        if file.suffix in (".py", ".pyi"):
            return self._resolve_python(module, file)
        start = Path(os.path.normpath(file.parent / module))
        choices = [start, *(start.with_name(start.name + extension) for extension in SCRIPT_EXTENSIONS)]
        choices += [start / f"index{extension}" for extension in SCRIPT_EXTENSIONS]
        if not module.startswith("."):
            choices = [folder / module for folder in self._folders(file)]
        return next((choice for choice in choices if self._has(choice)), None)

    def _resolve_python(self, module: str, file: Path) -> Path | None:
        names = module.lstrip(".")
        level = len(module) - len(names)
        if level:
            folders = [file.parents[level - 1]] if level <= len(file.parents) else []
        else:
            folders = self._folders(file)
        path = names.replace(".", "/")
        for folder in folders:
            for choice in (folder / f"{path}.py", folder / path / "__init__.py") if path else (folder / "__init__.py",):
                if self._has(choice):
                    return choice
        return None

    def _folders(self, file: Path) -> list[Path]:
        """Where an absolute import may begin: the root, then folders on the way to the file."""
        inside = [folder for folder in file.parents if _is_inside(folder, self.root)]
        return [*reversed(inside), self.root / "src", self.root / "include"]

    def _has(self, file: Path) -> bool:
        return file in self.open_texts or (_is_inside(file, self.root) and file.is_file())


def _joined(imported: Import) -> str:
    separator = "" if imported.module.endswith(".") else "."
    return f"{imported.module}{separator}{imported.name}"


def _is_inside(path: Path, root: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(root)
