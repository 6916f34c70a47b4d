"""Find secrets in a text: one pass of hyperscan selects the rules, RE2 finds the matches, false_positives.py decides.

hyperscan reads a text once for all rules (hundreds of MB/s) but has no groups; RE2 then runs only the few rules that
matched. Without hyperscan, literal hints select the rules: slower, with the same findings, since RE2 and the checks
decide either way. No pattern takes more than linear time, so no text can hang a build. Secrets are never sent anywhere
to check them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lakh import storage
from lakh.corpus.secrets.false_positives import (
    rejection,
    rejection_of_generic,
    rejection_of_named,
    rejection_of_password,
)
from lakh.corpus.secrets.pii import PII_KINDS, rejection_of_pii
from lakh.corpus.secrets.rules import NAMED_KIND, SecretRule, named_kind
from lakh.errors import ConfigError, LakhError, MissingExtra

__all__ = ["SecretFinding", "SecretScanner", "has_hyperscan"]

CONTEXT_CHARS = 40
MIN_GENERIC_DIGITS = 2
RE2_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, order=True)
class SecretFinding:
    begin: int
    """Byte offset in the UTF-8 text."""
    end: int
    kind: str
    value: str


def has_hyperscan() -> bool:
    try:
        import hyperscan  # noqa: F401
    except ImportError:
        return False
    return True


class SecretScanner:
    """Compiled rules. The first compilation takes half a second; one scanner per process is enough."""

    def __init__(self, rules: Sequence[SecretRule], *, use_hyperscan: bool | None = None) -> None:
        self.rules = tuple(rules)
        self._compiled = [_compile(rule) for rule in self.rules]
        self._database = (
            _database(self.rules) if (has_hyperscan() if use_hyperscan is None else use_hyperscan) else None
        )
        self._by_hint: dict[str, list[int]] = {}
        for number, rule in enumerate(self.rules):
            for hint in rule.hints:
                self._by_hint.setdefault(hint, []).append(number)

    def find(self, data: bytes) -> list[SecretFinding]:
        """All findings, in order, without overlap: of two that overlap, the earlier rule wins."""
        found: list[SecretFinding] = []
        for number in self.candidates(data):
            rule = self.rules[number]
            for match in self._compiled[number].finditer(data):
                finding = _finding(rule, match, data)
                if finding and not any(f.begin < finding.end and finding.begin < f.end for f in found):
                    found.append(finding)
        return sorted(found)

    def candidates(self, data: bytes) -> list[int]:
        """The rules that may match, in their order."""
        if self._database is None:
            lowered = data.lower()
            hinted = {n for hint, numbers in self._by_hint.items() if hint.encode() in lowered for n in numbers}
            return sorted(hinted)
        hit: set[int] = set()
        self._database.scan(data, match_event_handler=lambda number, *_: hit.add(number))
        return sorted(hit)


def _finding(rule: SecretRule, match: Any, data: bytes) -> SecretFinding | None:
    group = 2 if rule.kind == NAMED_KIND else 1
    begin, end = match.span(group)
    if begin < 0:
        return None
    kind = rule.kind
    if kind == "generic-credential" and sum(48 <= c <= 57 for c in data[begin:end]) < MIN_GENERIC_DIGITS:
        return None  # the most common case: decided before decoding
    value = data[begin:end].decode("utf-8", "replace")
    if kind == "private-key":
        return SecretFinding(begin, end, kind, value) if "REDACTED" not in value[:200] else None
    if value[:1] in "\"'" and value[-1:] == value[:1] and len(value) > 2:
        value, begin, end = value[1:-1], begin + 1, end - 1
    before = data[max(0, begin - CONTEXT_CHARS) : begin].decode("utf-8", "replace")
    if kind == NAMED_KIND:
        name = match.group(1).decode("utf-8", "replace")
        value = value.rstrip(".:|") if not named_kind(name, value) else value
        kind = named_kind(name, value)
        rejected = rejection_of_named(value) if kind else "no shape of that service"
        end = begin + len(value.encode())
    elif kind in PII_KINDS:
        rejected = rejection_of_pii(kind, value, before)
    elif kind == "generic-credential":
        follows = data[end : end + 1]
        assigned = re.search(r"[\x60'\"]\s*$", before) is not None or "." not in value
        rejected = "a call" if follows == b"(" else rejection_of_generic(value, before) if assigned else "an expression"
    elif kind == "password":
        rejected = rejection_of_password(value)
    elif kind == "curl-user":
        rejected = "a variable" if "$" in value or ":" not in value else rejection(value, rule.min_entropy)
    else:
        rejected = rejection(value, rule.min_entropy) if rule.checked else ""
        after = data[end : end + 1]
        if not rejected and rule.checked and after and (after.isalnum() or after == b"_") and value[-1].isalnum():
            rejected = "goes on"  # longer than this kind of secret
    return None if rejected else SecretFinding(begin, end, kind, value)


def _compile(rule: SecretRule) -> Any:
    try:
        import re2
    except ImportError:  # a light install reads corpora and does not build them
        raise MissingExtra("corpus secrets", "google-re2", "corpus") from None
    options = re2.Options()
    options.max_mem = RE2_MEMORY_BYTES
    options.log_errors = False
    try:
        return re2.compile(rule.pattern.encode(), options)
    except re2.error as error:
        todo = "write it in RE2 syntax: no look-around, no back-references"
        raise ConfigError(rule.kind, f"the pattern {rule.pattern!r} is wrong ({error})", todo) from None


def _database(rules: Sequence[SecretRule]) -> Any:
    """The rules compiled for hyperscan, from the cache if an earlier process compiled the same set."""
    import hyperscan

    flags = hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_ALLOWEMPTY
    quick = [(number, rule.quick) for number, rule in enumerate(rules)]
    listed = [(n, text) for n, texts in quick for text in ((texts,) if isinstance(texts, str) else texts)]
    made_of = repr((listed, int(flags), importlib.metadata.version("hyperscan"), platform.machine()))
    place = storage.cache_folder("rules") / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.hyperscan"
    try:
        database = hyperscan.loadb(place.read_bytes(), hyperscan.HS_MODE_BLOCK)
        database.scratch = hyperscan.Scratch(database)
    except (OSError, hyperscan.error):  # missing, damaged, or of another processor: hyperscan checks it
        database = hyperscan.Database()
        database.compile(
            expressions=[text.encode() for _, text in listed],
            ids=[number for number, _ in listed],
            elements=len(listed),
            flags=[flags] * len(listed),
        )
        with contextlib.suppress(OSError, LakhError):  # a read-only home: the next process compiles again
            storage.write_bytes(place, hyperscan.dumpb(database))
    return database
