"""Is a match a secret, or a placeholder, an identifier, a path? Pure decisions with their reason.

Secrets are random; text that people write is not (randomness.py). CHECKS has a test for each kind of evidence:

    value         a format of its own announces the secret: reject placeholders, templates and repeats
    named         the name of a service announces it: it must look random
    random        a word like Bearer announces it: the same, and not a path or a version
    generic       a name like `token` announces it: the same, and not a hash with a named algorithm
    password      a name like `password` announces it: anything except words, templates and code
    url-password  its place in a URL announces it
    basic         base 64 of user:password
    json          a JSON object in a string: one of its values must look random
    private-key   a key block

Each returns why the value is not a secret, or "".
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from itertools import pairwise

from lakh.corpus.secrets.randomness import entropy_bits, surprise_bits
from lakh.corpus.secrets.rules import exception_pattern

__all__ = ["CHECKS", "rejection"]

PLACEHOLDER, PATH, VERSION = map(exception_pattern, ("placeholders", "paths", "versions"))
MIN_DISTINCT = 5
MIN_BITS = 5.85
"""Bits per character (randomness.py) from which a value of letters and digits is taken for random."""
MIN_LETTER_BITS = 5.6
SURELY_RANDOM_BITS = 7.0
HASH_NAME = re.compile(
    r"(?i)sha\d|md5|digest|checksum|integrity|hash|commit|revision|fingerprint|key_?id|uuid|guid|etag|public_?key|"
    r"pub_?key|nonce|example|x5t|thumbprint|token_?id|client_?id|access_?id"
)
OTHER_NAME = re.compile(
    r"(?i)tokeni[sz]|tokens?_(?:type|count|ids)|keyboard|keyword|keyframe|monkey|author\b|protobuf_key|accessib|accessor"
)
UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
CODE = re.compile(r"[(){}\[\]<>$;]|::|->|=>|&&|\|\||\\")
TEMPLATE = re.compile(r"\s|\$[{(]|\{\{")
HEX = re.compile(r"[0-9a-f]{16,}|[0-9A-F]{16,}")
JSON_VALUE = re.compile(r'\\"([^"\\]{16,})\\"')
WORDS_ONLY = re.compile(r"[A-Za-z]+(?:[_\-. ,:/@#+]+[A-Za-z]+)*[_\-:!?.]*\d{0,2}")
COMMON_PASSWORD = re.compile(r"(?i)(?:pass(?:w(?:or)?d)?|admin|root|user|test|guest|secret|login|qwerty|abc)[\d!_.\-]*")


def rejection(value: str, check: str, min_entropy: float, before: str = "", after: str = "") -> str:
    """Why a value is not a secret; "" if it may be one. `before` and `after` are the text around it."""
    # a placeholder of lakh, or the rest of one, with punctuation in it
    if "REDACTED" in re.sub(r"[^A-Z]", "", re.split(r"\s", before)[-1] + value):
        return "redacted before"
    found = PLACEHOLDER.search(value) if check != "private-key" else None
    if found:
        return f"placeholder: {found.group()}"
    if len(set(value)) < min(MIN_DISTINCT, len(value) // 2):
        return "repeats"
    bits = entropy_bits(value)
    if bits < min_entropy and check not in ("password", "url-password", "basic"):
        return f"entropy {bits:.1f} below {min_entropy}"
    return CHECKS[check](value, before, after)


def _value(value: str, before: str, after: str) -> str:
    if HEX.fullmatch(value) and HASH_NAME.search(before):
        return "a hash"
    goes_on = after and (after[0].isalnum() or after[0] == "_") and value[-1].isalnum()
    return "goes on" if goes_on else ""


def _named(value: str, before: str, after: str) -> str:
    return "" if value.isdigit() or UUID.fullmatch(value) else _not_random(value)


def _random(value: str, before: str, after: str) -> str:
    if VERSION.match(value) or (PATH.search(value) and surprise_bits(value) < SURELY_RANDOM_BITS):
        return "a path or a version"
    return _not_random(value)


def _generic(value: str, before: str, after: str) -> str:
    if after[:1] in "([" and after:
        return "a call"
    line = before.rpartition("\n")[2]
    if HASH_NAME.search(line):
        return "a name for a hash, an identifier or a public key"
    if OTHER_NAME.search(line):
        return "another kind of token or key"
    if value.isdigit():
        return "" if len(value) >= 16 else "a number"
    return _random(value, before, after)


def _password(value: str, before: str, after: str) -> str:
    if (CODE.search(value) or "://" in value or PATH.search(value)) and surprise_bits(value) < SURELY_RANDOM_BITS:
        return "a template, code or a path"
    if TEMPLATE.search(value) or not any(c.isalpha() for c in value):
        return "a template or a number"
    if WORDS_ONLY.fullmatch(value) or COMMON_PASSWORD.fullmatch(value):
        return "words"
    if "." in value and re.fullmatch(r"[A-Za-z_][\w.]*", value):
        return "an expression"
    mixed = any(c.isdigit() for c in value) or re.search(r"[!@#%^&*+=?~]", value)
    if not mixed and surprise_bits(value) < MIN_LETTER_BITS:
        return "words"
    if re.fullmatch(r"[A-Za-z_][A-Za-z_\-]*\d{0,2}", value) and surprise_bits(value) < MIN_LETTER_BITS:
        return "an identifier"
    return ""


def _url_password(value: str, before: str, after: str) -> str:
    if re.fullmatch(r"(?i)(?:pass(?:w(?:or)?d)?|pwd?|secret|token|user(?:name)?|x+|\*+|%s|%v|\.+|-+)\d{0,3}", value):
        return "a placeholder"
    if CODE.search(value) or re.fullmatch(r"[A-Z_]{3,}|%\w+%?", value):
        return "a template"
    return ""


def _basic(value: str, before: str, after: str) -> str:
    try:
        decoded = base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return "not base 64 of a text"
    return "" if ":" in decoded and decoded.isprintable() and len(decoded) >= 3 else "not user:password"


def _json(value: str, before: str, after: str) -> str:
    values = JSON_VALUE.findall(value)
    return "" if any(not _not_random(one) for one in values) else "no random value in it"


def _private_key(value: str, before: str, after: str) -> str:
    body = re.sub(r"-----[^-]*-----", "", value)
    letters = sum(c.isalnum() or c in "+/=" for c in body)
    return "" if letters >= 64 and letters >= 0.6 * len(body) else "no key in it"


CHECKS: dict[str, Callable[[str, str, str], str]] = {
    "value": _value,
    "named": _named,
    "random": _random,
    "generic": _generic,
    "password": _password,
    "url-password": _url_password,
    "basic": _basic,
    "json": _json,
    "private-key": _private_key,
}


def _not_random(value: str) -> str:
    """Why a value reads like written text; "" if it looks random."""
    core = value.strip("=-_.:/")
    if len(core) < 8:
        return "short"
    if TEMPLATE.search(value) or (CODE.search(value) and surprise_bits(value) < SURELY_RANDOM_BITS):
        return "a template or code"
    if core.startswith("eyJ") and len(core) >= 20:
        return ""  # base 64 of a JSON object
    for piece in re.split(r"[_.:\-]", core):
        if HEX.fullmatch(piece) and sum(a.isdigit() != b.isdigit() for a, b in pairwise(piece)) >= 4:
            return ""
    digits = sum(c.isdigit() for c in core)
    letters = sum(c.isalpha() for c in core)
    bits = surprise_bits(core)
    if digits >= 2 and letters >= 3:
        return "" if bits >= MIN_BITS else f"reads like words ({bits:.1f} bits per character)"
    turns = sum(a.isupper() != b.isupper() for a, b in pairwise(core))
    if letters >= 12 and bits >= MIN_BITS + (0.0 if turns >= len(core) / 3 else 0.6):
        return ""
    return "letters as in a name"
