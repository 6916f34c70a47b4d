"""Is a text code of its language? Measured on the syntax tree and on its parts, with limits per language in one table.

    error share     bytes that tree-sitter could not fit into the tree, over all bytes. Not `has_error`: one macro in a
                    C header sets that, and says nothing of the other thousand lines
    comment, string and number shares   from normalise.py: licence texts, data tables, escaped blobs

Grammars come as single-language packages; a language without one is judged by its shares alone. C headers that fail
as C are tried as C++. Hostile text can make a parser quadratic, so the first PARSED_BYTES of a text are parsed alone;
only where they look bad (the cut itself may break a string or a class) is the whole text parsed. A parse is given up
after `parse_cpu_s` of processor time and the document dropped; every other verdict depends on the text alone.

Also marks documents: `test` (by its place), `asserts` (holds assertions), `covered=0.83` (from a coverage report).

Cost: the parse, 0.1-0.25 s per MB: the dearest part of a build.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from lakh.corpus.document import Stage, drop
from lakh.corpus.filters.coverage import read_coverage
from lakh.corpus.parsing.languages import is_test
from lakh.errors import ConfigError

__all__ = [
    "LIMITS",
    "QualityLimits",
    "QualitySettings",
    "error_share",
    "has_assertions",
    "has_grammar",
    "quality",
    "quality_reason",
]


class QualityLimits(NamedTuple):
    """The largest shares that a text may have."""

    error: float = 0.10
    comment: float = 0.90
    string: float = 0.92
    number: float = 0.60


# C and C++ stand out: macros are not in the grammar. Markup has no tokens.
LIMITS = {
    "c": QualityLimits(error=0.35),
    "cpp": QualityLimits(error=0.35),
    "cuda": QualityLimits(error=0.35),
    "go": QualityLimits(error=0.05),
    "java": QualityLimits(error=0.05),
    "javascript": QualityLimits(error=0.05),
    "python": QualityLimits(error=0.05),
    "rust": QualityLimits(error=0.10),
    "typescript": QualityLimits(error=0.10),
    "html": QualityLimits(comment=0.95, string=1.0, number=0.8),
    "markdown": QualityLimits(comment=1.0, string=1.0, number=0.8),
    "restructuredtext": QualityLimits(comment=1.0, string=1.0, number=0.8),
    "sql": QualityLimits(string=1.0, number=0.8),
}

# language: (module, function); .tsx and .jsx have their own below
GRAMMARS = {
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "cuda": ("tree_sitter_cpp", "language"),
    "go": ("tree_sitter_go", "language"),
    "java": ("tree_sitter_java", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "python": ("tree_sitter_python", "language"),
    "rust": ("tree_sitter_rust", "language"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
}
PARSED_BYTES = 16_384
MIN_JUDGED_CHARS = 400  # a version file is one string, and none the worse for it
CHUNK_BYTES = 4096  # how often the parser comes back for more, and looks at the clock
# Each begins with letters that are looked for as they stand, at memory speed; one pattern for all of them would be
# tried at every character, and cost as much as the parse.
ASSERTIONS = {
    literal: re.compile(pattern)
    for literal, pattern in {
        "assert": r"assert(?<=\bassert)\w*\s*[(!. ]",
        "expect": r"expect(?<=\bexpect)\s*\(",
        ".should": r"\.should\b",
        "REQUIRE": r"REQUIRE(?<=\bREQUIRE)\s*\(",
        "EXPECT_": r"EXPECT_(?<=\bEXPECT_)\w+\s*\(",
        "t.Error": r"t\.Error(?<=\bt\.Error)f?\(",
        "t.Fatal": r"t\.Fatal(?<=\bt\.Fatal)f?\(",
    }.items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QualitySettings:
    """Quality limits."""

    enabled: bool = True
    """Judge documents at all."""
    parse_cpu_s: float = 10.0
    """Processor time that the parse of one document may take."""
    slack: float = 1.0
    """Multiplies the allowed share of syntax errors of every language."""
    drop_tests: bool = False
    """Drop test files, rather than mark them."""
    coverage: tuple[str, ...] = ()
    """Coverage reports (Cobertura XML, lcov), each as REPO=FILE; documents are marked with the share they name."""

    def __post_init__(self) -> None:
        if self.parse_cpu_s <= 0:
            raise ConfigError("parse_cpu_s", f"{self.parse_cpu_s} is not positive", "choose e.g. 10")
        if self.slack < 0:
            raise ConfigError("slack", f"{self.slack} is negative", "choose 0 or more")
        for item in self.coverage:
            if "=" not in item:
                raise ConfigError("coverage", f"{item!r} has no repository", "write it as REPO=FILE")


def quality(settings: QualitySettings) -> Stage:
    """The stage that drops documents outside their language's limits (reason low-quality) and marks the others."""

    covered: dict[tuple[str, str], float] | None = None

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        nonlocal covered
        if covered is None:  # once, however often the stage is called
            covered = {
                (repo, path): share
                for item in settings.coverage
                for repo, _, url in [item.partition("=")]
                for path, share in read_coverage(url).items()
            }
        for batch in batches:
            yield _quality(batch, settings, covered) if settings.enabled else batch

    return stage


def quality_reason(
    *, language: str, error: float, comment: float, string: float, number: float, slack: float = 1.0
) -> str:
    """Why a text with these shares is left out; "" keeps it."""
    limits = LIMITS.get(language, QualityLimits())
    for name, share, limit in (
        ("syntax errors", error, limits.error * slack),
        ("comments", comment, limits.comment),
        ("strings", string, limits.string),
        ("numbers", number, limits.number),
    ):
        if share > limit:
            return f"{share:.0%} {name}, over {limit:.0%} for {language}"
    return ""


def has_assertions(text: str) -> bool:
    return any(literal in text and pattern.search(text) is not None for literal, pattern in ASSERTIONS.items())


def has_grammar(language: str) -> bool:
    return _parser(language) is not None


def error_share(data: bytes, language: str, path: str = "", *, cpu_s: float = 10.0) -> float:
    """Bytes outside the tree over bytes parsed; 0 for a language without a grammar, 1 for too slow a parse."""
    suffix = PurePosixPath(path).suffix.lower()
    tried = ["tsx" if suffix == ".tsx" else language]
    if language == "c" and suffix == ".h":
        tried.append("cpp")
    limit = LIMITS.get(language, QualityLimits()).error
    share = 0.0
    for text in _beginnings(data):
        shares = []
        for grammar in tried:
            shares.append(_error_share(text, grammar, cpu_s))
            if shares[-1] <= limit / 4:  # good enough not to ask another grammar
                break
        share = min(shares)
        if share <= limit:
            break
    return share


def _beginnings(data: bytes) -> Iterator[bytes]:
    """The first PARSED_BYTES up to a line's end, then all."""
    if len(data) > PARSED_BYTES:
        yield data[: data.rfind(b"\n", 0, PARSED_BYTES) + 1 or PARSED_BYTES]
    yield data


def _error_share(data: bytes, language: str, cpu_s: float) -> float:
    parser = _parser(language)
    if parser is None or not data:
        return 0.0
    deadline = time.thread_time() + cpu_s
    late = False

    def read(offset: int, _: Any) -> bytes:
        nonlocal late
        late = late or time.thread_time() > deadline
        return b"" if late else data[offset : offset + CHUNK_BYTES]  # no bytes: the parser takes it for the end

    tree = parser.parse(read)
    return 1.0 if late or tree is None else min(_error_bytes(tree.root_node) / len(data), 1.0)


def _error_bytes(root: Any) -> int:
    """Bytes of ERROR nodes that no sound named part of theirs accounts for; a missing token counts as one byte."""
    total = 0
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.is_missing:
            total += 1
        if not node.has_error:
            continue
        children = node.children
        if node.is_error:
            total += node.end_byte - node.start_byte
            total -= sum(child.end_byte - child.start_byte for child in children if child.is_named)
            waiting += [child for child in children if child.is_named]
        else:
            waiting += [child for child in children if child.has_error or child.is_missing]
    return total


@lru_cache(maxsize=32)
def _parser(language: str) -> Any:
    if language not in GRAMMARS:
        return None
    module, function = GRAMMARS[language]
    try:
        import tree_sitter

        grammar = getattr(importlib.import_module(module), function)()
    except ImportError:
        return None
    return tree_sitter.Parser(tree_sitter.Language(grammar))


def _quality(batch: Any, settings: QualitySettings, covered: dict[tuple[str, str], float]) -> Any:
    names = ("text", "language", "repo", "path", "marks", "reason", "comment_share", "string_share", "number_share")
    rows = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    reasons, details, all_marks = [], [], []
    for text, language, repo, path, marks, reason, comment, string, number in rows:
        verdict = ""
        words = dict.fromkeys((marks or "").split())
        if not reason:
            if is_test(path):
                words["test"] = None
            if has_assertions(text):
                words["asserts"] = None
            if (repo, path) in covered:
                words[f"covered={covered[repo, path]:.2f}"] = None
            shares = {"comment": comment, "string": string, "number": number}
            if len(text) < MIN_JUDGED_CHARS:
                shares = dict.fromkeys(shares, 0.0)
            verdict = quality_reason(language=language, error=0.0, **shares)
            if settings.drop_tests and "test" in words:
                verdict = "a test file"
            if not verdict:  # the parse is dear: not where the shares have decided already
                error = error_share(text.encode(), language, path, cpu_s=settings.parse_cpu_s)
                verdict = quality_reason(language=language, error=error, slack=settings.slack, **shares)
        reasons.append("low-quality" if verdict else "")
        details.append(verdict)
        all_marks.append(" ".join(words))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["marks"] = pa.array(all_marks, pa.string())
    batch = pa.record_batch([columns[name] for name in batch.schema.names], schema=batch.schema)
    return drop(batch, reasons, details)
