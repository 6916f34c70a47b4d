"""The files of a repository in the order of their imports: dependencies come before the files that use them.

A model that reads a repository as one long text should see a function before its use. Imports are found by pattern (no
parse), resolved against the paths of the repository, and sorted: dependencies first, ties by path. Cycles are common
and allowed: when only cycles are left, the file with the fewest missing dependencies goes next, then the first by path.
The result depends on the set of files, never on their order.

Languages: Python, JavaScript and TypeScript, Java, Go, Rust, C and C++. Others keep the order of their paths.

Cost: one search for a word such as `import` over each text, patterns where it occurs, and O((files + imports) log
files). `in_import_order` orders a stream; it holds one repository, or WINDOW_BYTES of a larger one, in memory.
"""

from __future__ import annotations

import heapq
import itertools
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import rows_of

__all__ = ["SourceFile", "imports_of", "in_import_order", "order_files"]

WINDOW_BYTES = 32 << 20


class SourceFile(NamedTuple):
    path: str
    language: str
    text: str


def order_files(files: Sequence[SourceFile]) -> list[int]:
    """Positions of the files of one repository in import order."""
    index = _PathIndex(file.path for file in files)
    by_path = {file.path: position for position, file in reversed(list(enumerate(files)))}
    needs = [{by_path[path] for path in imports_of(file, index)} - {at} for at, file in enumerate(files)]
    users: dict[int, list[int]] = defaultdict(list)
    for position, wanted in enumerate(needs):
        for target in wanted:
            users[target].append(position)
    left = [len(wanted) for wanted in needs]
    # (missing dependencies, path); stale entries are skipped
    heap = [(left[position], file.path, position) for position, file in enumerate(files)]
    heapq.heapify(heap)
    done = [False] * len(files)
    order: list[int] = []
    while heap:
        missing, _, position = heapq.heappop(heap)
        if done[position] or missing != left[position]:
            continue
        done[position] = True
        order.append(position)
        for user in users[position]:
            if not done[user]:
                left[user] -= 1
                heapq.heappush(heap, (left[user], files[user].path, user))
    return order


def in_import_order(batches: Iterator[Any]) -> Iterator[Any]:
    """The same rows; kept ones in import order within their repository, dropped ones as soon as they come.

    Rows of one repository must be adjacent. A repository larger than WINDOW_BYTES, or than a split, is ordered in
    parts. Runs last: row numbers change.
    """
    held: list[Any] = []
    size, repo = 0, ""
    for batch in batches:
        is_kept = pc.equal(batch.column("reason"), "")
        dropped = batch.filter(pc.invert(is_kept))
        if dropped.num_rows:
            yield dropped
        for rows in _by_repo(batch.filter(is_kept)):
            if held and (rows.column("repo")[0].as_py() != repo or size >= WINDOW_BYTES):
                yield from _ordered(held)
                held, size = [], 0
            repo = rows.column("repo")[0].as_py()
            held.append(rows)
            size += pc.sum(pc.binary_length(rows.column("text"))).as_py()
    if held:
        yield from _ordered(held)


def _by_repo(batch: Any) -> Iterator[Any]:
    """Slices of adjacent rows of one repository."""
    start = 0
    for _, rows in itertools.groupby(batch.column("repo").to_pylist()):
        size = len(list(rows))
        yield batch.slice(start, size)
        start += size


def _ordered(held: list[Any]) -> Iterator[Any]:
    rows = pa.Table.from_batches(held).combine_chunks()
    positions = order_files([SourceFile(*values) for values in rows_of(rows, "path", "language", "text")])
    yield from rows.take(pa.array(positions, pa.int64())).combine_chunks().to_batches()


def imports_of(file: SourceFile, index: _PathIndex) -> list[str]:
    """Paths of the repository that a file imports."""
    resolve = _RESOLVERS.get(file.language)
    return sorted(set(resolve(file, index)) - {""}) if resolve else []


class _PathIndex:
    """The paths of a repository, also by their endings: `a/b/c.py` is found as `c.py` and `b/c.py`."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = set(paths)
        self.by_folder: dict[str, list[str]] = defaultdict(list)
        for path in sorted(self.paths):
            self.by_folder[posixpath.dirname(path)].append(path)
        self._by_tail, self._folders_by_tail = _by_tail(self.paths), _by_tail(self.by_folder)

    def first(self, candidates: Iterable[str]) -> str:
        """The first candidate that is a path of the repository, or ""."""
        return next((path for path in candidates if path in self.paths), "")

    def nearest(self, tails: Iterable[str], near: str) -> str:
        """Of the paths that end in the first known tail, the one that shares the longest prefix with `near`, or ""."""
        return _nearest(next((self._by_tail[tail] for tail in tails if tail in self._by_tail), []), near)

    def nearest_folder(self, tails: Iterable[str], near: str) -> list[str]:
        """The files of the nearest folder that ends in the first known tail."""
        found = next((self._folders_by_tail[tail] for tail in tails if tail in self._folders_by_tail), [])
        return self.by_folder[_nearest(found, near)] if found else []


def _by_tail(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        parts = path.split("/")
        for start in range(len(parts)):
            found["/".join(parts[start:])].append(path)
    return found


def _nearest(paths: Iterable[str], near: str) -> str:
    def closeness(path: str) -> tuple[int, int]:
        return len(posixpath.commonprefix([path.split("/"), near.split("/")])), -len(path)

    return max(paths, key=closeness, default="")


PY_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
# Between import or export and from: names, braces, commas, stars. Each pattern begins with a literal word, which is
# searched at memory speed.
JS_NAMES = r"""[\w$*{},\s]{0,2000}?\bfrom\s*['"]([^'"\n]+)['"]"""
JS_IMPORTS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"""import(?<=\bimport)(?:\b{JS_NAMES}|\s*\(?\s*['"]([^'"\n]+)['"])""",
        rf"""export(?<=\bexport)\b{JS_NAMES}""",
        r"""require(?<=\brequire)\s*\(\s*['"]([^'"\n]+)['"]""",
    )
)
JAVA_IMPORT = re.compile(r"^\s*import\s+(?:static\s+)?([\w.]+?)(?:\.\*)?\s*;", re.MULTILINE)
GO_IMPORT = re.compile(r"^import\s*(?:\(([^)]*)\)|(?:[\w.]+\s+)?\"([^\"\n]+)\")", re.MULTILINE)
RUST_MOD = re.compile(r"^\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;", re.MULTILINE)
RUST_USE = re.compile(r"use(?<=\buse)\s+((?:crate|super|self)(?:::\w+)+)")
C_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([\"<])([^\">\n]+)[\">]", re.MULTILINE)
JS_ENDINGS = ("", ".ts", ".tsx", ".d.ts", ".js", ".jsx", ".mjs", ".cjs", "/index.ts", "/index.tsx", "/index.js")


def _lines_with(word: str, pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, ...]]:
    """The groups of a pattern that begins at a line's start, tried at the lines that contain a word."""
    at = text.find(word)
    while at >= 0:
        found = pattern.match(text, text.rfind("\n", 0, at) + 1)
        if found:
            yield found.groups(default="")
        at = text.find(word, max(found.end(), at + 1) if found else at + len(word))


# Each resolver yields the path of every import that it finds, or "" for one that is not in the repository.


def _python(file: SourceFile, index: _PathIndex) -> Iterable[str]:
    for source, names, plain in _lines_with("import", PY_IMPORT, file.text):
        modules = [item.split()[0] for item in plain.split(",") if item.split()] if plain else [source]
        imported = re.findall(r"\w+", re.sub(r"\bas\s+\w+", "", names)) if source else []
        for module in modules:
            dots = len(module) - len(module.lstrip("."))
            place = module.lstrip(".").replace(".", "/")
            if dots:
                base = posixpath.dirname(file.path)
                for _ in range(dots - 1):
                    base = posixpath.dirname(base)
                place = posixpath.join(base, place) if place else base
            for name in [*(f"{place}/{name}" for name in imported), place]:
                tails = (f"{name}.py", f"{name}/__init__.py", f"{name}.pyi")
                yield index.first(tails) if dots else index.nearest(tails, file.path)


def _javascript(file: SourceFile, index: _PathIndex) -> Iterable[str]:
    folder = posixpath.dirname(file.path)
    for match in itertools.chain.from_iterable(pattern.finditer(file.text) for pattern in JS_IMPORTS):
        name = next(filter(None, match.groups()), "")
        if name.startswith("."):
            place = posixpath.normpath(posixpath.join(folder, name))
            stem = re.sub(r"\.(m|c)?js$", "", place)
            yield index.first(base + ending for base in (place, stem) for ending in JS_ENDINGS)


def _java(file: SourceFile, index: _PathIndex) -> Iterable[str]:
    for (name,) in _lines_with("import", JAVA_IMPORT, file.text):
        parts = name.split(".")
        # import static a.B.c names a member, import a.B.C may name an inner class: shorten until a file fits
        yield index.nearest(("/".join(parts[:end]) + ".java" for end in range(len(parts), 1, -1)), file.path)


def _go(file: SourceFile, index: _PathIndex) -> Iterable[str]:
    for block, single in _lines_with("import", GO_IMPORT, file.text):
        for name in [single] if single else re.findall(r"\"([^\"\n]+)\"", block):
            parts = name.split("/")  # the repository's own prefix is not in its paths
            found = index.nearest_folder(("/".join(parts[start:]) for start in range(len(parts))), file.path)
            yield from (path for path in found if path.endswith(".go"))


def _rust(file: SourceFile, index: _PathIndex) -> Iterable[str]:
    folder, name = posixpath.split(file.path)
    own = folder if name in ("mod.rs", "lib.rs", "main.rs") else posixpath.join(folder, name.removesuffix(".rs"))

    def first(stems: Iterable[str]) -> str:
        return index.first(stem.lstrip("/") + ending for stem in stems for ending in (".rs", "/mod.rs"))

    for (module,) in _lines_with("mod", RUST_MOD, file.text):
        yield first(f"{base}/{module}" for base in (own, folder))
    root = folder.strip("/")
    while root and not index.first(f"{root}/{top}" for top in ("lib.rs", "main.rs")):
        root = posixpath.dirname(root)
    for path in RUST_USE.findall(file.text):
        head, *parts = path.split("::")
        base = {"crate": root, "self": own, "super": posixpath.dirname(own)}[head]
        while parts and parts[0] == "super":
            base, parts = posixpath.dirname(base), parts[1:]
        yield first(posixpath.join(base, *parts[:end]) for end in range(len(parts), 0, -1))


def _c(file: SourceFile, index: _PathIndex) -> Iterable[str]:
    folder = posixpath.dirname(file.path)
    for sign, name in _lines_with("include", C_INCLUDE, file.text):
        beside = posixpath.normpath(posixpath.join(folder, name))
        if sign == '"' and beside in index.paths:
            yield beside
        else:
            yield index.nearest([posixpath.normpath(name).lstrip("./")], file.path)


_RESOLVERS: dict[str, Callable[[SourceFile, _PathIndex], Iterable[str]]] = {
    "python": _python,
    "javascript": _javascript,
    "typescript": _javascript,
    "java": _java,
    "go": _go,
    "rust": _rust,
    "c": _c,
    "cpp": _c,
    "cuda": _c,
}
