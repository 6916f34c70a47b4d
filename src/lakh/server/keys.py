"""API keys: who a request belongs to.

A file with one key and its tenant's name per line (`KEY TENANT`; lines that begin with # are notes). Keys are
compared in constant time by their SHA-256, so that neither the table nor the time of an answer tells a key. The
tenant is what caches, superseding and quotas are kept apart by. A file that says nothing usable is a UserError.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from lakh.errors import UserError

__all__ = ["Keys"]

SHORTEST_KEY = 8
FORM = "write lines of the form: KEY TENANT"


class Keys:
    def __init__(self, tenants: dict[str, str]) -> None:
        """key -> tenant"""
        self._tenants = {_digest(key): tenant for key, tenant in tenants.items()}

    @staticmethod
    def load(path: str) -> Keys:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(path, f"cannot be read ({type(error).__name__})", FORM) from None
        tenants = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or len(words[0]) < SHORTEST_KEY:
                found = f"line {number} is not a key of {SHORTEST_KEY} or more characters and a tenant"
                raise UserError(path, found, FORM)
            tenants[words[0]] = words[1]
        if not tenants:
            raise UserError(path, "has no keys", FORM)
        return Keys(tenants)

    def tenant(self, key: str) -> str | None:
        """Whose key this is; None for nobody's. Looks at all of them, whatever it finds."""
        wanted, found = _digest(key), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, wanted):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
