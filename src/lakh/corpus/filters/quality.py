"""Drop texts that are not code of their language, by the limits of their language (parsing/languages.toml).

    error share     bytes that do not fit the syntax tree (syntax.py); languages without a grammar skip this check
    comment, string and number shares   from parsing/text_features.py: licence texts, data tables, escaped blobs

All decisions depend on the text only, except that a parse that takes more than `parse_cpu_s` drops its document.

Also tags documents in `marks`: `test` (by path), `asserts` (contains assertions), `covered=0.83` (coverage report).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lakh.corpus.document import Filter, drop_for, rows_of, with_columns
from lakh.corpus.filters.coverage import read_coverage
from lakh.corpus.filters.syntax import error_share
from lakh.corpus.parsing.languages import LANGUAGES, is_test
from lakh.errors import ConfigError

__all__ = ["LIMITS", "QualityLimits", "QualitySettings", "has_assertions", "quality_filter", "quality_reason"]


class QualityLimits(NamedTuple):
    """The largest allowed shares of a text."""

    error: float = 0.10
    comment: float = 0.90
    string: float = 0.92
    number: float = 0.60


LIMITS = {language: QualityLimits(**row.get("limits", {})) for language, row in LANGUAGES.items()}
MIN_JUDGED_CHARS = 400  # shorter texts skip the share limits: a version file is one string
# Each pattern begins with a literal that is searched first, at memory speed; one pattern for all of them would be
# tried at every character and cost as much as the parse.
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
    """Whether to apply the quality limits."""
    parse_cpu_s: float = 10.0
    """Processor time that the parse of one document may take."""
    slack: float = 1.0
    """Multiplies the allowed share of syntax errors of every language."""
    drop_tests: bool = False
    """Drop test files instead of tagging them."""
    coverage: tuple[str, ...] = ()
    """Coverage reports (Cobertura XML, lcov), each as REPO=FILE; documents are tagged with their covered share."""

    def __post_init__(self) -> None:
        if self.parse_cpu_s <= 0:
            raise ConfigError("parse_cpu_s", f"{self.parse_cpu_s} is not positive", "choose e.g. 10")
        if self.slack < 0:
            raise ConfigError("slack", f"{self.slack} is negative", "choose 0 or more")
        for item in self.coverage:
            if "=" not in item:
                raise ConfigError("coverage", f"{item!r} has no repository", "write it as REPO=FILE")


def quality_filter(settings: QualitySettings) -> Filter:
    """Drop documents outside their language's limits (reason low-quality) and tag the others."""
    if not settings.enabled:
        return lambda batch: batch
    covered = {
        (repo, path): share
        for repo, _, url in (item.partition("=") for item in settings.coverage)
        for path, share in read_coverage(url).items()
    }
    names = ("text", "language", "repo", "path", "marks", "reason", "comment_share", "string_share", "number_share")

    def apply(batch: Any) -> Any:
        details, all_marks = [], []
        for text, language, repo, path, marks, reason, *shares in rows_of(batch, *names):
            detail = ""
            tags = dict.fromkeys((marks or "").split())
            if not reason:
                if is_test(path):
                    tags["test"] = None
                if has_assertions(text):
                    tags["asserts"] = None
                if (repo, path) in covered:
                    tags[f"covered={covered[repo, path]:.2f}"] = None
                if settings.drop_tests and "test" in tags:
                    detail = "a test file"
                else:
                    detail = _low_quality(text, language, path, shares, settings)
            details.append(detail)
            all_marks.append(" ".join(tags))
        return drop_for(with_columns(batch, marks=all_marks), "low-quality", details)

    return apply


def _low_quality(text: str, language: str, path: str, shares: list[float], settings: QualitySettings) -> str:
    comment, string, number = shares if len(text) >= MIN_JUDGED_CHARS else (0.0, 0.0, 0.0)
    reason = partial(quality_reason, language=language, comment=comment, string=string, number=number)
    detail = reason(error=0.0)
    if detail:  # no need for the expensive parse
        return detail
    limit = LIMITS.get(language, QualityLimits()).error
    error = error_share(text.encode(), language, path, limit=limit, cpu_s=settings.parse_cpu_s)
    return reason(error=error, slack=settings.slack)


def quality_reason(
    *, language: str, error: float, comment: float, string: float, number: float, slack: float = 1.0
) -> str:
    """Why a text with these shares is dropped; "" keeps it."""
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
