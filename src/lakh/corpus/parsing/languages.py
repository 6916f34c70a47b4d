"""The language of a file, by its name and if needed by its content; languages.toml has the table of languages.

`language_of(path)` needs only the name; `identify(path, head)` also reads the first bytes, for names that several
languages share (.h, .m, .pl, .ts, .v) and for scripts without an extension.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lakh.corpus.parsing import lexer as lex

__all__ = [
    "LANGUAGES",
    "identify",
    "is_test",
    "is_vendored",
    "language_of",
    "lexer_profile",
    "may_be_vendored",
    "suffix_of",
]

TABLE = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))
LANGUAGES: dict[str, dict[str, Any]] = TABLE["languages"]
BY_EXTENSION = {extension: name for name, row in LANGUAGES.items() for extension in row["extensions"]}
SHEBANGS = {language: re.compile(rf"\b{pattern}\b".encode()) for language, pattern in TABLE["shebangs"].items()}
HEAD_BYTES = 16_384
TEST_NAME = re.compile(
    r"^test_|_test\.|\.test\.|\.spec\.|_spec\.|tests?\.(java|kt|scala|cs|swift)$|^conftest\.py$", re.I
)
TEST_FOLDERS, VENDORED_FOLDERS = (frozenset(TABLE["folders"][kind]) for kind in ("test", "vendored"))
PERHAPS_VENDORED_FOLDERS = VENDORED_FOLDERS.union(TABLE["folders"]["perhaps_vendored"])


class DetectedLanguage(NamedTuple):
    language: str
    """"" if it is not collected."""
    reason: str


class LexerProfile(NamedTuple):
    family: int
    flags: int


def suffix_of(path: str) -> str:
    """Like PurePosixPath.suffix, which is slower than everything else that decides by a name."""
    stem, dot, end = path.rpartition("/")[2].rpartition(".")
    return dot + end if stem and end else ""


def language_of(path: str) -> str:
    """The language by name only, "" if it is not collected."""
    name = path.rpartition("/")[2].lower()
    found: str = BY_EXTENSION.get(suffix_of(name)[1:], "") or TABLE["names"].get(name, "")
    return found


def identify(path: str, head: bytes) -> DetectedLanguage:
    """The language by name and, for shared names, by the first bytes of the content."""
    name = path.rpartition("/")[2]
    suffix = suffix_of(name.lower())
    language = language_of(path)
    head = head[:HEAD_BYTES]
    for row in TABLE["ambiguous"].get(suffix[1:], []):
        if _found(row["pattern"], head) and not ("unless" in row and _found(row["unless"], head)):
            return DetectedLanguage(row["language"], row["reason"])
    if language:
        return DetectedLanguage(language, f"named {name}")
    if not suffix and head.startswith(b"#!"):
        line = head.split(b"\n", 1)[0]
        for found, pattern in SHEBANGS.items():
            if pattern.search(line):
                return DetectedLanguage(found, f"begins with {line.decode(errors='replace')[:60]}")
    return DetectedLanguage("", f"no language has the extension {suffix!r}")


def _found(pattern: str, head: bytes) -> bool:
    return re.search(pattern.encode(), head, re.MULTILINE) is not None


def is_test(path: str) -> bool:
    """Whether a path is named like a test or in a folder of tests."""
    *folders, name = path.split("/")
    return bool(TEST_NAME.search(name)) or not TEST_FOLDERS.isdisjoint(folder.lower() for folder in folders)


def is_vendored(path: str) -> bool:
    """Whether a path is in a folder for third-party code, which has another licence."""
    return not VENDORED_FOLDERS.isdisjoint(path.lower().split("/")[:-1])


def may_be_vendored(path: str) -> bool:
    """Whether a path is in a folder that often holds third-party code, and sometimes the repository's own."""
    return not PERHAPS_VENDORED_FOLDERS.isdisjoint(path.lower().split("/")[:-1])


@lru_cache(maxsize=256)
def lexer_profile(language: str) -> LexerProfile:
    """How to lex a language; those of the family TABLE have a table of their own."""
    row = LANGUAGES.get(language, {})
    if row.get("lexer") == "python":
        return LexerProfile(lex.PYTHON, 0)
    if "lexer" in row:
        return LexerProfile(lex.CLIKE, sum(getattr(lex, flag.upper()) for flag in row["lexer"]))
    return LexerProfile(lex.TABLE, 0)
