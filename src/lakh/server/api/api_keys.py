"""API keys: which tenant a request belongs to, and the tenant's quota.

The file has one key and its tenant per line, and optionally the tenant's limits:

    KEY TENANT [requests_per_minute=N] [tokens_per_minute=N] [at_once=N]

Lines that start with # are comments. A tenant may have several keys; its limits are on any one of their lines. Keys are
compared in constant time by their SHA-256, so timing reveals nothing. Caches, superseding and quotas are per tenant.
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
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            if len(fields) < 2 or len(fields[0]) < SHORTEST_KEY or "=" in fields[1]:
                found = f"line {number} is not a key of {SHORTEST_KEY} or more characters and a tenant"
                raise UserError(path, found, FORM)
            key, tenant, *limits = fields
            tenants[key] = tenant
            if limits:
                quotas[tenant] = _quota(limits, f"{path}, line {number}")
        if not tenants:
            raise UserError(path, "has no keys", FORM)
        return ApiKeys(tenants, quotas)

    def reload(self, path: str) -> None:
        """Replace all keys and quotas by those of the file. Raises a UserError and changes nothing if it has errors.
        Running requests continue.
        """
        new = ApiKeys.load(path)
        self._tenants = new._tenants
        self.quotas.clear()
        self.quotas.update(new.quotas)

    @property
    def num_keys(self) -> int:
        return len(self._tenants)

    def tenant(self, key: str) -> str | None:
        """The key's tenant; None for an unknown key. Always compares all keys."""
        wanted, found = _digest(key), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, wanted):
                found = tenant
        return found


def _quota(settings: list[str], where: str) -> Quota:
    limits = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in Quota.names() or not value.isdecimal() or int(value) < 1:
            raise UserError(where, f"{setting!r} is not a limit", FORM)
        limits[name] = int(value)
    return Quota(**limits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
