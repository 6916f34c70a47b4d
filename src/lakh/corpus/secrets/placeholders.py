"""Replacement texts for secrets: typed, of the same length, with the same punctuation.

    ghp_4fJ...(36)              ghp_REDACTEDGITHUBTOKENREDACTEDGITHUBTOK
    9f1c-...(a Heroku UUID)     REDACTED-HERO-KUCR-EDEN-TIALREDACTED
    jane.doe@corp.com           redacted@example.com
    83.12.4.7                   192.0.2.0             (an address reserved for documentation, RFC 5737)

The surrounding code keeps its shape (a length check still holds, a JSON file still parses), a model sees the kind of
the secret, and a second run finds nothing: false_positives.py rejects REDACTED, and pii.py the reserved names.
"""

from __future__ import annotations

import re
from itertools import cycle

__all__ = ["fill", "placeholder"]

PREFIX = re.compile(r"^(?:[A-Za-z]{2,16}[_\-.~]){1,4}|^(?:AKIA|ASIA|AIza|LTAI|SK|SG\.|EAA[A-Z]|dapi|xox[a-z]-)")
MAX_PREFIX = 16
FIXED = {"email": "redacted@example.com", "ipv4": "192.0.2.0", "ipv6": "2001:db8::", "host": "host.example.com"}


def placeholder(kind: str, value: str) -> str:
    """The replacement for `value`, a pure function of its arguments."""
    if kind in FIXED:
        return FIXED[kind]
    if kind == "phone":
        digits = cycle("5550100")
        return "".join(next(digits) if c.isdigit() else c for c in value)
    if kind == "private-key":
        begin, end = value.find("-----", 5) + 5, value.rfind("-----", 0, len(value) - 5)
        inner = value[begin:end] if end > begin else ""
        return value[:begin] + fill("private-key", inner) + value[end:] if inner else fill(kind, value)
    if value.isdigit():
        return "0" * len(value)
    found = PREFIX.match(value)
    kept = found.end() if found and found.end() <= MAX_PREFIX and found.end() < len(value) // 2 else 0
    return value[:kept] + fill(kind, value[kept:])


def fill(kind: str, value: str) -> str:
    """REDACTED and the kind in place of the letters and digits."""
    letters = cycle("REDACTED" + re.sub(r"[^A-Z0-9]", "", kind.upper()))
    return "".join(next(letters) if c.isalnum() else c for c in value)
