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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lakh import storage
from lakh.corpus.secrets.false_positives import rejection
from lakh.corpus.secrets.pii import PII_KINDS, rejection_of_pii
from lakh.corpus.secrets.rules import SecretRule
from lakh.errors import ConfigError, LakhError, MissingExtra

__all__ = ["SecretFinding", "SecretScanner", "has_hyperscan"]

CONTEXT_BYTES = 40
MIN_SECRET_BYTES = 6
SEARCHED_AGAIN = ("generic", "password", "random")
MAX_SEARCHED_AGAIN = 200  # bytes of a rejected value; keeps every text linear
RE2_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, order=True)
class SecretFinding:
    begin: int
    """Byte offset in the UTF-8 text."""
    end: int
    kind: str
    value: str
    spans: tuple[tuple[int, int], ...] = ()
    """The bytes that may be replaced (editable.py); () means all of them."""


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
        self._compiled = [_compile(rule.kind, rule.pattern) for rule in self.rules]
        allowed = {text: _compile("allowed", text) for rule in self.rules for text in rule.allowed}
        self._allowed = [[allowed[text] for text in rule.allowed] for rule in self.rules]
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
            for finding in _matches(rule, self._compiled[number], data):
                value = finding.value.encode()
                overlaps = any(f.begin < finding.end and finding.begin < f.end for f in found)
                if not overlaps and not any(pattern.search(value) for pattern in self._allowed[number]):
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
        lowered = data.lower() if any(self.rules[number].needs_hint for number in hit) else b""
        return sorted(number for number in hit if not self.rules[number].needs_hint or self._hinted(number, lowered))

    def _hinted(self, number: int, lowered: bytes) -> bool:
        return any(hint.encode() in lowered for hint in self.rules[number].hints)


def _matches(rule: SecretRule, pattern: Any, data: bytes) -> Iterator[SecretFinding]:
    """What a rule finds. A rejected value may contain the name before the next one: the search goes on inside it."""
    at = 0
    while at <= len(data) and (match := pattern.search(data, at)) is not None:
        begin, end = match.span(rule.group or _secret_group(match))
        finding = _finding(rule, begin, end, data)
        again = finding is None and rule.check in SEARCHED_AGAIN and end - begin <= MAX_SEARCHED_AGAIN
        at = max(begin if again else match.end(), match.start() + 1)
        if finding:
            yield finding


def _secret_group(match: Any) -> int:
    """The first group that matched; groups of a few bytes only repeat a part of the pattern."""
    spans = [match.span(number) for number in range(match.re.groups + 1)]
    return next((n for n, (begin, end) in enumerate(spans) if n and end - begin >= MIN_SECRET_BYTES), 0)


def _finding(rule: SecretRule, begin: int, end: int, data: bytes) -> SecretFinding | None:
    value = data[begin:end].decode("utf-8", "replace")
    if value[:1] in "\"'" and value[-1:] == value[:1] and len(value) > 2:
        value, begin, end = value[1:-1], begin + 1, end - 1
    before = data[max(0, begin - CONTEXT_BYTES) : begin].decode("utf-8", "replace")
    after = data[end : end + 2].decode("utf-8", "replace")
    if rule.kind in PII_KINDS:
        rejected = rejection_of_pii(rule.kind, value, before)
    elif rule.check == "none":
        rejected = ""
    else:
        rejected = rejection(value, rule.check, rule.min_entropy, before, after)
    return None if rejected else SecretFinding(begin, end, rule.kind, value)


def _compile(kind: str, pattern: str) -> Any:
    try:
        import re2
    except ImportError:  # a light install reads corpora and does not build them
        raise MissingExtra("corpus secrets", "google-re2", "corpus") from None
    options = re2.Options()
    options.max_mem = RE2_MEMORY_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        todo = "write it in RE2 syntax: no look-around, no back-references"
        raise ConfigError(kind, f"the pattern {pattern!r} is wrong ({error})", todo) from None


def _database(rules: Sequence[SecretRule]) -> Any:
    """The rules compiled for hyperscan, from the cache if an earlier process compiled the same set."""
    import hyperscan

    flags = hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_ALLOWEMPTY
    listed = [(number, rule.quick) for number, rule in enumerate(rules)]
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
