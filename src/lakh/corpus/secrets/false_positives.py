"""Is a match a secret, or a placeholder, an identifier, a path? Pure decisions with their reason.

Secrets are random; text that people write is not. `rejection` checks the value itself: placeholder words, runs and
repeats, templates, too little entropy. Matches that only a name announces (`generic`) are also rejected if they look
like an identifier, a path, a version, a class name or a hash with a named algorithm.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import pairwise

from lakh.corpus.secrets.rules import exception_pattern

__all__ = ["entropy_bits", "rejection", "rejection_of_generic", "rejection_of_password"]

PLACEHOLDER, PATH, VERSION = map(exception_pattern, ("placeholders", "paths", "versions"))
MIN_DISTINCT = 5
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_]*(?:[.\-/][A-Za-z_]+)*\d{0,3}")
WORDS = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z]{3,}")


def entropy_bits(text: str) -> float:
    """Shannon entropy per character."""
    counts = Counter(text).values()
    return sum(-n / len(text) * math.log2(n / len(text)) for n in counts)


def rejection(value: str, min_entropy: float) -> str:
    """Why a value is not a secret; "" if it may be one."""
    found = PLACEHOLDER.search(value)
    if found:
        return f"placeholder: {found.group()}"
    if "REDACTED" in re.sub(r"[^A-Z]", "", value):  # a placeholder of lakh, with punctuation in it
        return "redacted before"
    if len(set(value)) < min(MIN_DISTINCT, len(value) // 2):
        return "repeats"
    bits = entropy_bits(value)
    if bits < min_entropy:
        return f"entropy {bits:.1f} below {min_entropy}"
    return ""


def rejection_of_named(value: str) -> str:
    """For a value of the right shape after a service's name: random letters and digits, or only digits."""
    if value.isdigit():
        return rejection(value, 2.0)
    turns = sum(a.isupper() != b.isupper() for a, b in pairwise(value))
    if not any(c.isdigit() for c in value) and turns < len(value) / 3:
        return "no digit, and letters as in a name"
    if IDENTIFIER.fullmatch(value) and len(WORDS.findall(value)) >= 2 and sum(c.isdigit() for c in value) < 2:
        return "reads like a name"
    return rejection(value, 2.5)


def rejection_of_password(value: str) -> str:
    """For a quoted text after a name like password: anything except a placeholder, a name or a template."""
    if re.search(r"[{}<>$%()\[\]\\]|://", value):
        return "a template or a path"
    if not (any(c.isdigit() for c in value) and any(c.isalpha() for c in value)) and not re.search(
        r"[=_\-!@#^&*+]", value
    ):
        return "a word or a number"
    if re.fullmatch(r"[A-Za-z]+(?:[_\-. ][A-Za-z]+)*[:!.]?\d?", value):
        return "words"
    return rejection(value, 2.0)


def rejection_of_generic(value: str, context: str) -> str:
    """For a text after a name like token, without other evidence: it must look random."""
    digits = sum(c.isdigit() for c in value)
    letters = sum(c.isalpha() for c in value)
    if digits < 2 or letters < 3:
        return "not both letters and digits"
    if PATH.search(value) or VERSION.match(value):
        return "a path or a version"
    if IDENTIFIER.fullmatch(value):
        return "an identifier"
    pieces = re.split(r"[_.\-/=+]", value)
    worded = sum(len(word) for piece in pieces for word in WORDS.findall(piece))
    mixed = value != value.lower() and value != value.upper()
    if len(pieces) > 1 and worded >= 0.5 * len(value):
        return "words"
    if len(pieces) == 1 and worded >= (0.6 if mixed else 0.7) * len(value) and digits < 4:
        return "words"
    changes = sum(a.isdigit() != b.isdigit() for a, b in pairwise(value))
    if changes < 3:
        return "digits at one place"
    if re.search(r"(?i)sha\d|md5|digest|checksum|integrity|hash|commit|revision|fingerprint|keyid|uuid|guid", context):
        return "a name for a hash"
    return rejection(value, 3.5)
