"""The names in a text of code, and the overlap of two sets of names, weighted by how rare each name is."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

__all__ = ["identifiers", "overlap", "rarity"]

_NAME = re.compile(r"[A-Za-z_$][\w$]{2,}")
_PART = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z]{3,}")
_WORDS = """
and any as assert async await bool break bytes case catch class const continue def default del dict elif else enum
except export extends false False finally float fn for from func function global if impl implements import in int
interface is lambda let list match mod module mut new None nonlocal not null or pass private protected pub public raise
return self set static str string struct super switch this throw trait true True try tuple type typing undefined use
var void while with yield
"""
_KEYWORDS = frozenset(_WORDS.split())


def identifiers(text: str) -> set[str]:
    """Names of at least three letters that are not keywords, and the words of names that have several."""
    names = {name for name in _NAME.findall(text) if name not in _KEYWORDS}
    parts = {part.lower() for name in names for part in _PART.findall(name)}
    return names | (parts - _KEYWORDS)


def rarity(texts: Iterable[Collection[str]]) -> dict[str, float]:
    """The inverse document frequency of each name in a collection of sets of names."""
    counts: Counter[str] = Counter()
    num = 0
    for names in texts:
        counts.update(names)
        num += 1
    return {name: math.log(1 + num / count) for name, count in counts.items()}


def overlap(query: Collection[str], names: Collection[str], weights: Mapping[str, float]) -> float:
    """The share of the query's weight that `names` contain: 0 to 1. Names without a weight count nothing."""
    total = sum(weights.get(name, 0.0) for name in query)
    return sum(weights.get(name, 0.0) for name in query if name in names) / total if total else 0.0
