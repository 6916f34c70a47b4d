"""The kinds of secrets and the format of each, from rules.toml.

Three of its tables become rules:

    [tokens]                   start with their own prefix: found anywhere
    [[special]], [[generic]]   regular expressions: key blocks, headers, URLs, markup; generic assignments, tried last
    [named]                    look like any random text: found after the name of their service

Each rule has hints, literal texts (lower case) of which a document must contain one, for the search without hyperscan.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lakh.corpus.secrets.shapes import regex_of

__all__ = ["NAMED_KIND", "SecretRule", "exception_pattern", "named_kind", "rule_tables", "rules", "written_rules"]

NAMED_KIND = "named"
"""All of [named] is one rule; `named_kind` gives the service of a match."""
DEFAULT_TOKEN_ENTROPY = 2.0


@dataclass(frozen=True)
class SecretRule:
    kind: str
    pattern: str
    """RE2; group 1 is the secret."""
    quick: str | tuple[str, ...]
    """For hyperscan: the pattern, or a bounded prefix of it; several if one would be slow."""
    hints: tuple[str, ...]
    min_entropy: float = 0.0
    """Bits per character of the secret."""
    checked: bool = True
    """Whether false_positives.py checks the match."""


@lru_cache(maxsize=1)
def rule_tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def rules() -> tuple[SecretRule, ...]:
    """All rules, the most specific first: of two overlapping matches, the earlier rule wins."""
    return (*_tokens(), *written_rules("special"), _named_rule(), *written_rules("generic"))


def written_rules(table: str) -> list[SecretRule]:
    """The rules of a table whose patterns are regular expressions: special, generic or pii."""
    made = []
    for entry in rule_tables()[table]:
        written = entry["quick"]
        quick = _filled(written) if isinstance(written, str) else tuple(map(_filled, written))
        texts = {"pattern": _filled(entry["pattern"]), "quick": quick, "hints": tuple(entry["hints"])}
        made.append(SecretRule(**entry | texts))
    return made


def exception_pattern(name: str, around: str = "{}") -> re.Pattern[str]:
    """One pattern for a list of [exceptions]; `around` has {} at the place of the alternatives."""
    return re.compile(around.format("|".join(rule_tables()["exceptions"][name])), re.IGNORECASE)


def named_kind(name: str, value: str) -> str:
    """The kind of a value after a service's name; "" if it has none of that service's formats."""
    lowered = name.lower()
    for words, shapes in _named():
        if any(word in lowered for word in words) and any(shape.fullmatch(value) for shape in shapes):
            return f"{words[0].replace('_', '-')}-credential"
    return ""


def _filled(pattern: str) -> str:
    """A pattern with its <fragments> filled in; a fragment may contain an earlier one."""
    for name, text in reversed(rule_tables()["fragments"].items()):
        pattern = pattern.replace(f"<{name}>", text)
    return pattern


def _tokens() -> list[SecretRule]:
    made = []
    min_entropy = rule_tables()["min_entropy"]
    for kind, shapes in rule_tables()["tokens"].items():
        for written in shapes:
            shape = written.removeprefix("~")
            flag = "(?i)" if written != shape else ""
            body = regex_of(shape)
            tail = "={0,3}" if "<b" in shape and "=" not in shape else ""
            start = r"\b" if re.match(r"[\w<{\[]", shape) and not shape.startswith("<z") else ""
            pattern, quick = f"{flag}{start}({body}{tail})", f"{flag}{start}{_bounded(body)}"
            made.append(SecretRule(kind, pattern, quick, _hints(shape), min_entropy.get(kind, DEFAULT_TOKEN_ENTROPY)))
    return made


def _hints(shape: str) -> tuple[str, ...]:
    """The longest literal of a shape, once for each choice at its start."""
    opening = re.match(r"\{([^{}]+)\}([^<{\[]*)", shape)
    if opening:
        return tuple((choice + opening.group(2)).lower() for choice in opening.group(1).split("|"))
    literals = re.split(r"<[^>]*>|\[[^\]]*\]|\{[^}]*\}", shape)
    return (max(literals, key=len).lower(),)


def _bounded(body: str) -> str:
    """For hyperscan, the shortest match is enough."""
    return re.sub(r"(\{[1-9]\d*),\d*\}$", r"\1}", body)


@lru_cache(maxsize=1)
def _named() -> tuple[tuple[tuple[str, ...], tuple[re.Pattern[str], ...]], ...]:
    return tuple(
        (tuple(words.split()), tuple(re.compile(regex_of(shape), re.IGNORECASE) for shape in shapes))
        for words, shapes in rule_tables()["named"].items()
    )


def _named_rule() -> SecretRule:
    words = sorted({word for names, _ in _named() for word in names}, key=lambda word: (-len(word), word))
    names = "|".join(re.escape(word) for word in words)
    pattern = _filled(rf"(?i)((?:{names})<between>)([\w=+/.:%|~\-]{{12,140}})<end>")
    # one expression a word: hyperscan finds the literals first and continues only there
    quick = tuple(_filled(rf"(?i){re.escape(word)}<name_tail>") for word in words)
    return SecretRule(NAMED_KIND, pattern, quick, tuple(words))
