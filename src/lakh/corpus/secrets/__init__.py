"""Secrets and personal data: found by rules of our own, replaced by typed placeholders or reason to drop a document.

To read the folder: shapes.py (the notation), rules.py (the kinds), judge.py (secret or placeholder?), pii.py (personal
data), scan.py (the search), placeholders.py (what stands there afterwards); here is the stage.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa

from lakh.corpus.document import Stage, drop
from lakh.corpus.secrets.pii import PII_KINDS, rules_of
from lakh.corpus.secrets.placeholders import placeholder
from lakh.corpus.secrets.rules import rules
from lakh.corpus.secrets.scan import SecretFinding, SecretScanner
from lakh.errors import ConfigError

__all__ = ["SecretFinding", "SecretScanner", "SecretSettings", "redact", "redacted", "scanner_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretSettings:
    """Secrets and personal data."""

    action: Literal["redact", "drop", "keep"] = "redact"
    """What happens to a document with findings: replace them, drop the document, or keep it (nothing is looked for)."""
    pii: tuple[str, ...] = ("email", "ipv4", "phone")
    """Personal data to look for: email, ipv4, ipv6, phone."""
    internal_hosts: tuple[str, ...] = ()
    """Ends of host names that mean something inside your company alone, e.g. ".corp.acme.com"."""
    employee_ids: tuple[str, ...] = ()
    """Patterns (RE2) of numbers that stand for a person."""
    engine: Literal["auto", "hyperscan", "hints"] = "auto"
    """How rules are picked: auto takes hyperscan where it is installed. The findings are the same."""

    def __post_init__(self) -> None:
        for kind in self.pii:
            if kind not in PII_KINDS:
                raise ConfigError("pii", f"{kind!r} is not known", f"choose from: {', '.join(PII_KINDS)}")
        _check(self)


def redact(settings: SecretSettings) -> Stage:
    """The stage that replaces what was found, and notes {kind: number} in the column `secrets`."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch if settings.action == "keep" else _redact(batch, settings)

    return stage


def redacted(data: bytes, findings: list[SecretFinding]) -> bytes:
    """The text with a placeholder for each finding."""
    parts, at = [], 0
    for finding in findings:
        parts += [data[at : finding.begin], placeholder(finding.kind, finding.value).encode()]
        at = finding.end
    return b"".join([*parts, data[at:]])


@lru_cache(maxsize=4)
def scanner_of(settings: SecretSettings) -> SecretScanner:
    use = {"auto": None, "hyperscan": True, "hints": False}[settings.engine]
    own = rules_of(settings.pii, settings.internal_hosts, settings.employee_ids)
    return SecretScanner([*rules(), *own], use_hyperscan=use)


def _check(settings: SecretSettings) -> None:
    """Refuse a wrong pattern when settings are read, not in the middle of a build."""
    if settings.employee_ids:
        try:
            SecretScanner(rules_of((), (), settings.employee_ids), use_hyperscan=False)
        except ConfigError as error:
            raise ConfigError("employee_ids", error.found, error.todo) from None


def _redact(batch: Any, settings: SecretSettings) -> Any:
    scanner = scanner_of(settings)
    texts = batch.column("text").to_pylist()
    hashes = batch.column("sha256").to_pylist()
    notes, reasons, details = [""] * len(texts), [""] * len(texts), [""] * len(texts)
    changed = False
    for row, text in enumerate(texts):
        findings = scanner.find(text.encode()) if text else []
        if not findings:
            continue
        counts = dict(sorted(Counter(finding.kind for finding in findings).items()))
        notes[row] = json.dumps(counts)
        if settings.action == "drop":
            reasons[row], details[row] = "secret", ", ".join(f"{number} {kind}" for kind, number in counts.items())
            continue
        data = redacted(text.encode(), findings)
        texts[row], hashes[row], changed = data.decode(), hashlib.sha256(data).hexdigest(), True
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if changed:
        columns["text"] = pa.array(texts, batch.schema.field("text").type)
        columns["sha256"] = pa.array(hashes, pa.string())
    columns["secrets"] = pa.array(notes, pa.string())
    batch = pa.record_batch([columns[name] for name in batch.schema.names], schema=batch.schema)
    return drop(batch, reasons, details)
