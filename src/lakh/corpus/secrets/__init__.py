"""Secrets and personal data: found by rules, replaced by typed placeholders, or a reason to drop the document.

rules.py (gitleaks.toml and lakh's own rules.toml), scan.py (the search), false_positives.py (secret or placeholder?),
randomness.py (random or written?), pii.py (personal data), editable.py (what may be replaced), placeholders.py
(replacement texts); the filter is here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from lakh.corpus.document import Filter, drop_for, with_columns
from lakh.corpus.secrets.editable import editable_findings
from lakh.corpus.secrets.pii import PII_KINDS, rules_of
from lakh.corpus.secrets.placeholders import fill, placeholder
from lakh.corpus.secrets.rules import rules
from lakh.corpus.secrets.scan import SecretFinding, SecretScanner
from lakh.errors import ConfigError

__all__ = ["SecretFinding", "SecretScanner", "SecretSettings", "find_secrets", "redacted", "redaction", "scanner_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretSettings:
    """Secrets and personal data."""

    action: Literal["redact", "drop", "keep"] = "redact"
    """What to do with findings: replace them, drop the document, or keep it (no search)."""
    pii: tuple[str, ...] = ("email", "ipv4", "phone")
    """Personal data to search for: email, ipv4, ipv6, phone."""
    internal_hosts: tuple[str, ...] = ()
    """Suffixes of internal host names, e.g. ".corp.acme.com"."""
    employee_ids: tuple[str, ...] = ()
    """Patterns (RE2) of numbers that identify a person."""
    engine: Literal["auto", "hyperscan", "hints"] = "auto"
    """How to select rules: auto uses hyperscan if it is installed. The findings are the same."""

    def __post_init__(self) -> None:
        for kind in self.pii:
            if kind not in PII_KINDS:
                raise ConfigError("pii", f"{kind!r} is not known", f"choose from: {', '.join(PII_KINDS)}")
        _check(self)


def redaction(settings: SecretSettings) -> Filter:
    """Replace what is found and write {kind: count} to the column `secrets`, or drop the document (reason secret)."""
    return (lambda batch: batch) if settings.action == "keep" else lambda batch: _redact(batch, settings)


def find_secrets(data: bytes, settings: SecretSettings, language: str = "") -> list[SecretFinding]:
    """What is to be replaced in a text of this language: never an identifier."""
    return editable_findings(data, scanner_of(settings).find(data), language)


def redacted(data: bytes, findings: list[SecretFinding]) -> bytes:
    """The text with a placeholder for each finding."""
    parts, at = [], 0
    for finding in findings:
        whole = (finding.begin, finding.end)
        for begin, end in finding.spans or (whole,):
            value = finding.value if (begin, end) == whole else data[begin:end].decode("utf-8", "replace")
            made = placeholder(finding.kind, value) if (begin, end) == whole else fill(finding.kind, value)
            parts += [data[at:begin], made.encode()]
            at = end
    return b"".join([*parts, data[at:]])


@lru_cache(maxsize=4)
def scanner_of(settings: SecretSettings) -> SecretScanner:
    use = {"auto": None, "hyperscan": True, "hints": False}[settings.engine]
    own = rules_of(settings.pii, settings.internal_hosts, settings.employee_ids)
    return SecretScanner([*rules(), *own], use_hyperscan=use)


def _check(settings: SecretSettings) -> None:
    """Reject a wrong pattern when settings are read, not in the middle of a build."""
    if settings.employee_ids:
        try:
            SecretScanner(rules_of((), (), settings.employee_ids), use_hyperscan=False)
        except ConfigError as error:
            raise ConfigError("employee_ids", error.found, error.todo) from None


def _redact(batch: Any, settings: SecretSettings) -> Any:
    texts, hashes, languages = (batch.column(name).to_pylist() for name in ("text", "sha256", "language"))
    notes, details = [""] * len(texts), [""] * len(texts)
    changed = False
    for row, text in enumerate(texts):
        findings = find_secrets(text.encode(), settings, languages[row]) if text else []
        if not findings:
            continue
        counts = dict(sorted(Counter(finding.kind for finding in findings).items()))
        notes[row] = json.dumps(counts)
        if settings.action == "drop":
            details[row] = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            continue
        data = redacted(text.encode(), findings)
        texts[row], hashes[row], changed = data.decode(), hashlib.sha256(data).hexdigest(), True
    if changed:
        batch = with_columns(batch, text=texts, sha256=hashes)
    return drop_for(with_columns(batch, secrets=notes), "secret", details)
