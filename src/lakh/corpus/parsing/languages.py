"""The language of a file, by its name and if needed by its content, and the lexer profile of each language.

`language_of(path)` needs only the name; `identify(path, head)` also reads the first bytes, for names that several
languages share (.h, .m, .pl, .ts, .v) and for scripts without an extension.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lakh.corpus.parsing import lexer as lex

__all__ = [
    "EXTENSIONS",
    "LANGUAGES",
    "DetectedLanguage",
    "LexerProfile",
    "identify",
    "is_test",
    "is_vendored",
    "language_of",
    "lexer_profile",
    "may_be_vendored",
]

EXTENSIONS = {
    "bash": "sh bash zsh",
    "c": "c h",
    "clojure": "clj cljs cljc",
    "cmake": "cmake",
    "cpp": "cc cpp cxx c++ hpp hh hxx h++ ipp tpp inl",
    "csharp": "cs",
    "css": "css scss less",
    "cuda": "cu cuh",
    "dart": "dart",
    "elixir": "ex exs",
    "erlang": "erl hrl",
    "fortran": "f90 f95 f03 f08",
    "fsharp": "fs fsi fsx",
    "go": "go",
    "groovy": "groovy gradle",
    "haskell": "hs",
    "html": "html htm",
    "java": "java",
    "javascript": "js jsx mjs cjs",
    "julia": "jl",
    "kotlin": "kt kts",
    "lua": "lua",
    "markdown": "md markdown",
    "matlab": "m",
    "ocaml": "ml mli",
    "perl": "pl pm",
    "php": "php",
    "powershell": "ps1 psm1",
    "protobuf": "proto",
    "python": "py pyi pyx",
    "r": "r",
    "restructuredtext": "rst",
    "ruby": "rb rake",
    "rust": "rs",
    "scala": "scala sc",
    "solidity": "sol",
    "sql": "sql",
    "swift": "swift",
    "typescript": "ts tsx mts cts",
    "verilog": "v sv svh",
    "zig": "zig",
}
LANGUAGES = {extension: language for language, names in EXTENSIONS.items() for extension in names.split()}
NAMES = {"cmakelists.txt": "cmake", "rakefile": "ruby", "gemfile": "ruby", "wscript": "python", "sconstruct": "python"}
SHEBANGS = (
    (re.compile(rb"\bpython[0-9.]*\b"), "python"),
    (re.compile(rb"\b(ba|z|k|da)?sh\b"), "bash"),
    (re.compile(rb"\bnode\b"), "javascript"),
    (re.compile(rb"\bperl\b"), "perl"),
    (re.compile(rb"\bruby\b"), "ruby"),
    (re.compile(rb"\blua\b"), "lua"),
    (re.compile(rb"\bphp\b"), "php"),
)
HEAD_BYTES = 16_384

CPP_SIGNS = re.compile(
    rb"^\s*(template\s*<|namespace\b|using\s+(namespace\b|\w+\s*=)|class\s+\w+[^;]*\{?|public:|private:|protected:)"
    rb"|\bstd::|\bconstexpr\b|\bnullptr\b|\bnoexcept\b|\boverride\b|#\s*include\s*<(vector|string|memory|map|iostream|utility|cstdint|algorithm|functional)>"
    rb"|\boperator\s*[=+\-*<>!\[(]|\bvirtual\s+\w",
    re.MULTILINE,
)
OBJC_SIGNS = re.compile(rb"^\s*(@interface|@implementation|@protocol|@property|@end\b|#import\s)", re.MULTILINE)
PROLOG_SIGNS = re.compile(rb"^:-\s|^\w+\(.*\)\s*:-", re.MULTILINE)

TEST_FOLDERS = frozenset({"test", "tests", "testing", "__tests__", "spec", "specs", "testdata", "testsuite"})
TEST_NAME = re.compile(
    r"^test_|_test\.|\.test\.|\.spec\.|_spec\.|tests?\.(java|kt|scala|cs|swift)$|^conftest\.py$", re.I
)
VENDORED_FOLDERS = frozenset(
    {"vendor", "vendored", "_vendor", "third_party", "thirdparty", "third-party", "3rdparty", "node_modules"}
    | {"bower_components", "site-packages", "_vendored"}
)
PERHAPS_VENDORED_FOLDERS = VENDORED_FOLDERS | {"external", "externals", "extern", "deps"}


@dataclass(frozen=True)
class DetectedLanguage:
    language: str
    """"" if it is not collected."""
    reason: str


@dataclass(frozen=True)
class LexerProfile:
    family: int
    flags: int


def language_of(path: str) -> str:
    """The language by name only, "" if it is not collected."""
    name = path.rpartition("/")[2].lower()
    return LANGUAGES.get(_suffix(name)[1:], "") or NAMES.get(name, "")


def identify(path: str, head: bytes) -> DetectedLanguage:
    """The language by name and, for shared names, by the first bytes of the content."""
    name = path.rpartition("/")[2]
    suffix = _suffix(name.lower())
    language = language_of(path)
    head = head[:HEAD_BYTES]
    if suffix == ".h":
        if OBJC_SIGNS.search(head):
            return DetectedLanguage("", "an Objective-C header")
        if CPP_SIGNS.search(head):
            return DetectedLanguage("cpp", "a header with C++ in it")
        return DetectedLanguage("c", "a header without C++ in it")
    if suffix == ".m" and (OBJC_SIGNS.search(head) or b"#include" in head):
        return DetectedLanguage("", "Objective-C")
    if suffix == ".ts" and head.lstrip()[:5] in (b"<?xml", b"<!DOC"):
        return DetectedLanguage("", "a Qt translation, not TypeScript")
    if suffix == ".pl" and PROLOG_SIGNS.search(head) and not re.search(rb"^\s*(use|my|sub)\s", head, re.MULTILINE):
        return DetectedLanguage("", "Prolog")
    if suffix == ".v" and re.search(rb"^\s*(Require|Theorem|Lemma|Proof)\b", head, re.MULTILINE):
        return DetectedLanguage("", "Coq")
    if language:
        return DetectedLanguage(language, f"named {name}")
    if not suffix and head.startswith(b"#!"):
        line = head.split(b"\n", 1)[0]
        for pattern, found in SHEBANGS:
            if pattern.search(line):
                return DetectedLanguage(found, f"begins with {line.decode(errors='replace')[:60]}")
    return DetectedLanguage("", f"no language has the extension {suffix!r}")


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


def _suffix(name: str) -> str:
    """The suffix of a file name: ".py"; "" for a name such as .bashrc."""
    stem, dot, end = name.rpartition(".")
    return dot + end if stem and end else ""


_C = lex.PREPROCESSOR | lex.DIGIT_QUOTE
_CLIKE = {
    "c": _C,
    "cpp": _C | lex.RAW_CPP,
    "cuda": _C | lex.RAW_CPP,
    "java": lex.TRIPLE,
    "csharp": lex.PREPROCESSOR | lex.TRIPLE,
    "go": lex.BACKTICK_RAW | lex.TRAILING_ALL,
    "rust": lex.NESTED | lex.RUST | lex.TRAILING_ALL,
    "javascript": lex.TEMPLATE | lex.REGEX | lex.SINGLE_STRING | lex.TRAILING_ALL,
    "typescript": lex.TEMPLATE | lex.REGEX | lex.SINGLE_STRING | lex.TRAILING_ALL,
    "kotlin": lex.NESTED | lex.TRIPLE | lex.TRAILING_ALL,
    "scala": lex.NESTED | lex.TRIPLE,
    "swift": lex.NESTED | lex.TRIPLE,
    "dart": lex.TRIPLE | lex.SINGLE_STRING | lex.TRAILING_ALL,
    "protobuf": lex.SINGLE_STRING,
    "solidity": lex.SINGLE_STRING,
}
# Comment marker of comment-only lines, for languages whose quoting is not modelled.
_LINE_COMMENT = {
    **dict.fromkeys(("bash", "cmake", "elixir", "julia", "perl", "powershell", "r", "ruby"), "#"),
    **dict.fromkeys(("haskell", "lua", "sql"), "--"),
    **dict.fromkeys(("erlang", "matlab"), "%"),
    **dict.fromkeys(("fsharp", "groovy", "php", "verilog", "zig"), "//"),
    "clojure": ";",
    "fortran": "!",
}


def lexer_profile(language: str) -> LexerProfile:
    """How to lex a language; an unknown one keeps all of its lines."""
    if language == "python":
        return LexerProfile(lex.PYTHON, 0)
    if language in _CLIKE:
        return LexerProfile(lex.CLIKE, _CLIKE[language])
    mark = _LINE_COMMENT.get(language, "").encode().ljust(2, b"\0")
    return LexerProfile(lex.LINES, mark[0] | mark[1] << 8)
