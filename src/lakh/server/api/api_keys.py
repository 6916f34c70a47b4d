"""API keys: who a request belongs to, and how much that tenant may ask.

A file with one key and its tenant's name per line, and the tenant's limits after it where it has some:

    KEY TENANT [requests_per_minute=N] [tokens_per_minute=N] [at_once=N]

IncrementalTokenizer that begin with # are notes; a tenant may have several keys, and its limits stand on any one of them. ApiKeys are
compared in constant time by their SHA-256, so that neither the table nor the time of an answer tells a key. The
tenant is what caches, superseding and quotas are kept apart by. A file that says nothing usable is a UserError.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from lakh.errors import UserError
from lakh.server.api.quota import Quota

__all__ = ["ApiKeys"]

SHORTEST_KEY = 8
FORM = f"write lines of the form: KEY TENANT, and after it any of {', '.join(f'{name}=N' for name in Quota.names())}"


class ApiKeys:
    def __init__(self, tenants: dict[str, str], quotas: Mapping[str, Quota] | None = None) -> None:
        """key -> tenant, tenant -> quota"""
        self._tenants = {_digest(key): tenant for key, tenant in tenants.items()}
        self.quotas = dict(quotas or {})

    @staticmethod
    def load(path: str) -> ApiKeys:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(path, f"cannot be read ({type(error).__name__})", FORM) from None
        tenants: dict[str, str] = {}
        quotas: dict[str, Quota] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) < 2 or len(words[0]) < SHORTEST_KEY or "=" in words[1]:
                found = f"line {number} is not a key of {SHORTEST_KEY} or more characters and a tenant"
                raise UserError(path, found, FORM)
            key, tenant, *limits = words
            tenants[key] = tenant
            if limits:
                quotas[tenant] = _quota(limits, f"{path}, line {number}")
        if not tenants:
            raise UserError(path, "has no keys", FORM)
        return ApiKeys(tenants, quotas)

    def tenant(self, key: str) -> str | None:
        """Whose key this is; None for nobody's. Looks at all of them, whatever it finds."""
        wanted, found = _digest(key), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, wanted):
                found = tenant
        return found


def _quota(words: list[str], where: str) -> Quota:
    limits = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in Quota.names() or not value.isdecimal() or int(value) < 1:
            raise UserError(where, f"{word!r} is no limit", FORM)
        limits[name] = int(value)
    return Quota(**limits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
