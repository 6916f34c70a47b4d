"""Is a distribution's licence permissive? A decision from the words in its metadata.

Cautious: a licence that is not recognised, or a copyleft licence next to a permissive one without OR, is refused.
Trusts the metadata; does not look at licence files (detect.py) or bundled third-party code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.message import Message
from importlib.metadata import PackageMetadata

from lakh.corpus.licences.expressions import PERMISSIVE, TABLES, LicenceDecision, classify_expression

__all__ = ["classify_fields", "classify_metadata"]

RESTRICTIVE = re.compile("|".join(TABLES["restrictive"]), re.IGNORECASE)
NAMES = [(re.compile(pattern, re.IGNORECASE), licence) for pattern, licence in TABLES["names"]]
SHORT_CHARS = 120
CLASSIFIER = "License :: "


def classify_metadata(*, expression: str = "", text: str = "", classifiers: Sequence[str] = ()) -> LicenceDecision:
    """Decide by License-Expression, else by License, else by the classifiers."""
    if expression.strip():
        return classify_expression(expression)
    from_text = _classify_text(text)
    if from_text is not None:
        return from_text
    named = [item.rpartition(" :: ")[2] for item in classifiers if item.startswith(CLASSIFIER)]
    named = [name for name in named if name != "OSI Approved"]
    if named:
        return _classify_classifiers(named)
    shown = " ".join(text.split())[:60]
    reason = f"licence {shown!r} is not recognised" if shown else "the metadata names no licence"
    return LicenceDecision(False, "", reason)


def classify_fields(fields: Message | PackageMetadata) -> LicenceDecision:
    """Decide by the fields of a PKG-INFO or METADATA file."""
    expression, text, classifiers = (
        fields.get_all(name) or [] for name in ("License-Expression", "License", "Classifier")
    )
    return classify_metadata(
        expression=expression[0] if expression else "", text=text[0] if text else "", classifiers=classifiers
    )


def _classify_text(text: str) -> LicenceDecision | None:
    text = " ".join(text.split())
    if text.lower() in ("", "unknown", "none", "dual license", "see license"):
        return None
    if len(text) > SHORT_CHARS:
        head = text.lower()
        if "gnu " in head[:400] or "general public license" in head:
            return LicenceDecision(False, "", "the licence text is not known to be permissive")
        found = next((name for phrase, name in TABLES["phrases"] if phrase in head), None)
        return LicenceDecision(True, found, f"the licence text is that of {found}") if found else None
    if text.lower() in PERMISSIVE:
        return LicenceDecision(True, text, f"{text} is permissive")
    if RESTRICTIVE.search(text):
        return LicenceDecision(False, text, f"{text} is not known to be permissive")
    found = _first_name(text)
    return LicenceDecision(True, found, f"{text!r} is permissive") if found else None


def _classify_classifiers(names: Sequence[str]) -> LicenceDecision:
    licences = []
    for name in names:
        found = _first_name(name)
        if not found or RESTRICTIVE.search(name):
            return LicenceDecision(False, "", f"classifier {name!r} is not known to be permissive")
        licences.append(found)
    joined = " OR ".join(dict.fromkeys(licences))
    return LicenceDecision(True, joined, f"the classifiers name {joined}")


def _first_name(text: str) -> str:
    return next((name for pattern, name in NAMES if pattern.search(text)), "")
