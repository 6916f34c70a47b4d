"""The rules for secrets: gitleaks' (gitleaks.toml) and lakh's own (rules.toml), both data.

lakh's tables are

    [[special]]    tokens with a prefix of their own, key blocks, headers, URLs, markup
    [[generic]]    assignments to a name that sounds like a credential, tried last
    [[pii]]        personal data (pii.py)

A rule has hints, literal texts (lower case) of which a document must contain one, for the search without hyperscan.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["SecretRule", "exception_pattern", "rule_tables", "rules", "written_rules"]

DEFAULT_ENTROPY = 2.5
ANY_NAME = r"[\w.-]{0,50}?"
"""How gitleaks' rules for a service begin. It may match nothing, so the rest finds the same secrets, and faster."""


@dataclass(frozen=True)
class SecretRule:
    kind: str
    pattern: str
    """RE2; the first group that matched is the secret, or the whole match of a pattern without groups."""
    quick: str
    """For hyperscan: the pattern, or a shorter one that matches wherever it does."""
    hints: tuple[str, ...]
    needs_hint: bool = False
    """Whether the hints are a condition of the rule and not only a part of every match."""
    min_entropy: float = DEFAULT_ENTROPY
    """Bits per character of the secret."""
    check: str = "value"
    """The test of the value, of false_positives.CHECKS."""
    allowed: tuple[str, ...] = ()
    """Patterns (RE2) of values that are no secrets."""
    group: int = 0
    """The group that is the secret; 0: the first that matched."""


@lru_cache(maxsize=1)
def rule_tables() -> dict[str, Any]:
    return _read("rules.toml")


@lru_cache(maxsize=1)
def rules() -> tuple[SecretRule, ...]:
    """All rules, the most specific first: of two overlapping matches, the earlier rule wins."""
    return (*written_rules("special"), *_gitleaks_rules(), *written_rules("generic"))


def written_rules(table: str) -> list[SecretRule]:
    """The rules of a table of rules.toml: special, generic or pii."""
    made = []
    for entry in rule_tables()[table]:
        fields = {name: value for name, value in entry.items() if name != "source"}
        pattern = _filled(entry["pattern"])
        texts = {"pattern": pattern, "quick": _filled(entry.get("quick", pattern)), "hints": tuple(entry["hints"])}
        made.append(SecretRule(**fields | texts))
    return made


def exception_pattern(name: str, around: str = "{}") -> re.Pattern[str]:
    """One pattern for a list of [exceptions]; `around` has {} at the place of the alternatives."""
    return re.compile(around.format("|".join(rule_tables()["exceptions"][name])), re.IGNORECASE)


def _gitleaks_rules() -> list[SecretRule]:
    made = []
    table = _read("gitleaks.toml")
    for entry in table["rules"]:
        regex = entry["regex"].replace("[[:alnum:]]", "[A-Za-z0-9]")
        pattern = regex.replace(ANY_NAME, "", 1)
        made.append(
            SecretRule(
                kind=entry["id"],
                pattern=pattern,
                quick=rule_tables()["gitleaks_quick"].get(entry["id"], pattern),
                hints=tuple(entry["keywords"]),
                needs_hint=True,
                min_entropy=entry.get("entropy", DEFAULT_ENTROPY),
                # after the name of its service, a value has no form of its own: it must look random
                check="named" if ANY_NAME in regex else "value",
                allowed=(*table["allowed"], *map(re.escape, table["stopwords"]), *entry.get("allowed", ())),
                group=entry.get("secretGroup", 0),
            )
        )
    return made


def _filled(pattern: str) -> str:
    """A pattern with its <fragments> filled in."""
    for name, text in rule_tables()["fragments"].items():
        pattern = pattern.replace(f"<{name}>", text)
    return pattern


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
