"""Bytes of a source file as UTF-8: UTF-16 and UTF-32 with a byte-order mark, and encodings that the file declares.

Without a mark or a declaration the bytes stay as they are: a wrong encoding would put wrong letters into a corpus.
"""

from __future__ import annotations

import codecs
import re

__all__ = ["as_utf8"]

MARKS = [
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
]
HEAD_BYTES = 1024
DECLARATION = re.compile(
    rb"\A(?:[^\n]*\n)?[^\n]*?coding[:=][ \t]*([-\w.]+)"  # Python (PEP 263), Ruby, Emacs: in the first two lines
    rb"|<\?xml[^>]*encoding=[\"']([-\w.]+)|@charset[ ]+\"([-\w.]+)\"|charset=[\"']?([-\w.]+)"
)
TEXT_ENCODINGS = re.compile(
    r"(iso[-_]?8859|latin|l\d|cp(125|437|85|866|932|949|950)|windows|koi8|euc|shift|s?jis|gb|big5|mac)", re.IGNORECASE
)


def as_utf8(raw: bytes) -> bytes:
    """The bytes as UTF-8 if their encoding is certain, else unchanged; valid UTF-8 is never changed."""
    encoding = next((name for mark, name in MARKS if raw.startswith(mark)), "")
    if not encoding:
        if raw.isascii() or (b"coding" not in raw[:HEAD_BYTES] and b"charset" not in raw[:HEAD_BYTES]):
            return raw
        found = DECLARATION.search(raw[:HEAD_BYTES])
        encoding = next(filter(None, found.groups()), b"").decode() if found else ""
        if not TEXT_ENCODINGS.match(encoding) or _is_utf8(raw):
            return raw
    try:
        return raw.decode(encoding).encode()
    except (UnicodeError, LookupError):
        return raw


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
