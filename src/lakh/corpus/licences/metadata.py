"""Is a licence permissive? A pure decision over the words that a distribution's metadata has for it.

Permissive means here: the text may be copied and changed for any purpose, with no duty to publish one's own
work. The decision is cautious: what is not recognised, or names a copyleft licence next to a permissive one
without saying OR, is refused. It trusts the metadata and does not look at licence files or at bundled
third-party code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["LicenceDecision", "classify_expression", "judge"]

# SPDX identifiers, lower case.
PERMISSIVE = frozenset(
    {
        "0bsd",
        "afl-3.0",
        "apache-1.1",
        "apache-2.0",
        "artistic-2.0",
        "blueoak-1.0.0",
        "bsd-1-clause",
        "bsd-2-clause",
        "bsd-2-clause-patent",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "bsd-3-clause-lbnl",
        "bsd-4-clause",
        "bsl-1.0",
        "bzip2-1.0.6",
        "cc0-1.0",
        "cnri-python",
        "curl",
        "hpnd",
        "icu",
        "isc",
        "libpng",
        "libpng-2.0",
        "mit",
        "mit-0",
        "mit-cmu",
        "mit-modern-variant",
        "ms-pl",
        "ncsa",
        "openssl",
        "postgresql",
        "psf-2.0",
        "python-2.0",
        "python-2.0.1",
        "tcl",
        "unicode-3.0",
        "unicode-dfs-2016",
        "unlicense",
        "upl-1.0",
        "w3c",
        "wtfpl",
        "x11",
        "zlib",
        "zpl-2.0",
        "zpl-2.1",
    }
)

# Free text and trove classifiers, tried in this order. A word of RESTRICTIVE anywhere in short text refuses
# it.
RESTRICTIVE = re.compile(
    r"\b(a|l)?gpl|gnu\b|copyleft|mozilla|\bmpl|eclipse|\bepl\b|cddl|eupl|proprietary|commercial"
    r"|all rights reserved|nvidia|cc[- ]by|creative commons attribution|share ?alike|\bsspl\b"
    r"|business source|\bbusl",
    re.IGNORECASE,
)
WORDS = (
    (re.compile(r"apache", re.I), "Apache-2.0"),
    (re.compile(r"\bmit[- ]cmu\b|hpnd|historical permission", re.I), "MIT-CMU"),
    (re.compile(r"\bmit\b|expat", re.I), "MIT"),
    (re.compile(r"\b0bsd\b|zero[- ]clause bsd", re.I), "0BSD"),
    (re.compile(r"bsd[- ]?(2|two)|\b(2|two)[- ]clause|simplified bsd", re.I), "BSD-2-Clause"),
    (re.compile(r"bsd", re.I), "BSD-3-Clause"),
    (re.compile(r"\bisc\b|\bISCL\b", re.I), "ISC"),
    (re.compile(r"\bpsf|python software foundation", re.I), "PSF-2.0"),
    (re.compile(r"zlib", re.I), "Zlib"),
    (re.compile(r"unlicense", re.I), "Unlicense"),
    (re.compile(r"boost software", re.I), "BSL-1.0"),
    (re.compile(r"\bzpl\b|zope public", re.I), "ZPL-2.1"),
    (re.compile(r"cc0", re.I), "CC0-1.0"),
    (re.compile(r"\bw3c\b", re.I), "W3C"),
    (re.compile(r"public domain", re.I), "Unlicense"),
)
# Some distributions paste the whole licence: these phrases are in the licences' own texts.
TEXTS = (
    ("permission is hereby granted, free of charge", "MIT"),
    ("redistribution and use in source and binary forms", "BSD-3-Clause"),
    ("apache license", "Apache-2.0"),
    ("permission to use, copy, modify, and/or distribute this software for any purpose", "ISC"),
)
SHORT_CHARS = 120
CLASSIFIER = "License :: "


@dataclass(frozen=True)
class LicenceDecision:
    permissive: bool
    licence: str
    """SPDX-like, "" where it was not recognised."""
    reason: str


def judge(*, expression: str = "", text: str = "", classifiers: Sequence[str] = ()) -> LicenceDecision:
    """Decide on License-Expression, then License, then the classifiers: the first that says something."""
    if expression.strip():
        return classify_expression(expression)
    from_text = _judge_text(text)
    if from_text is not None:
        return from_text
    named = [item.rpartition(" :: ")[2] for item in classifiers if item.startswith(CLASSIFIER)]
    named = [name for name in named if name != "OSI Approved"]
    if named:
        return _judge_classifiers(named)
    shown = " ".join(text.split())[:60]
    return LicenceDecision(
        False, "", f"licence {shown!r} is not recognised" if shown else "the metadata names no licence"
    )


def classify_expression(expression: str) -> LicenceDecision:
    """An SPDX expression: OR needs one permissive side, AND needs both; WITH only ever adds permissions."""
    words = re.findall(r"\(|\)|[^\s()]+", expression)
    shown = " ".join(expression.split())
    try:
        tokens = iter([*words, ""])
        allowed, last = _either(tokens)
        if last != "":
            raise ValueError(last)
    except (StopIteration, ValueError, RecursionError):
        return LicenceDecision(False, "", f"licence expression {shown!r} is malformed")
    return LicenceDecision(allowed, shown, f"{shown} is {'permissive' if allowed else 'not known to be permissive'}")


def _either(tokens: Iterator[str]) -> tuple[bool, str]:
    allowed, last = _both(tokens)
    while last.upper() == "OR":
        right, last = _both(tokens)
        allowed = allowed or right
    return allowed, last


def _both(tokens: Iterator[str]) -> tuple[bool, str]:
    allowed, last = _one(tokens)
    while last.upper() == "AND":
        right, last = _one(tokens)
        allowed = allowed and right
    return allowed, last


def _one(tokens: Iterator[str]) -> tuple[bool, str]:
    word = next(tokens)
    if word == "(":
        allowed, last = _either(tokens)
        if last != ")":
            raise ValueError(last)
    elif word in ("", ")") or word.upper() in ("AND", "OR", "WITH"):
        raise ValueError(word)
    else:
        allowed = word.lower().removesuffix("+") in PERMISSIVE
    last = next(tokens)
    if last.upper() == "WITH":
        next(tokens)
        last = next(tokens)
    return allowed, last


def _judge_text(text: str) -> LicenceDecision | None:
    text = " ".join(text.split())
    if text.lower() in ("", "unknown", "none", "dual license", "see license"):
        return None
    if len(text) > SHORT_CHARS:
        head = text.lower()
        if "gnu " in head[:400] or "general public license" in head:
            return LicenceDecision(False, "", "the licence text is not known to be permissive")
        found = next((name for phrase, name in TEXTS if phrase in head), None)
        return LicenceDecision(True, found, f"the licence text is that of {found}") if found else None
    if text.lower() in PERMISSIVE:
        return LicenceDecision(True, text, f"{text} is permissive")
    if RESTRICTIVE.search(text):
        return LicenceDecision(False, text, f"{text} is not known to be permissive")
    found = next((name for pattern, name in WORDS if pattern.search(text)), None)
    return LicenceDecision(True, found, f"{text!r} is permissive") if found else None


def _judge_classifiers(names: Sequence[str]) -> LicenceDecision:
    licences = []
    for name in names:
        found = next((licence for pattern, licence in WORDS if pattern.search(name)), None)
        if found is None or RESTRICTIVE.search(name):
            return LicenceDecision(False, "", f"classifier {name!r} is not known to be permissive")
        licences.append(found)
    joined = " OR ".join(dict.fromkeys(licences))
    return LicenceDecision(True, joined, f"the classifiers name {joined}")
