"""Personal and internal data: e-mail addresses, public IP addresses, phone numbers, internal hosts, employee numbers.

The patterns are in rules.toml; internal hosts and employee numbers come from the settings. Reserved addresses
(example.com, RFC 5737, private networks, git@host) identify nobody and stay.
"""

from __future__ import annotations

import ipaddress
import re

from lakh.corpus.secrets.rules import SecretRule, exception_pattern, rule_tables, written_rules

__all__ = ["PII_KINDS", "rejection_of_pii", "rules_of"]

PII_KINDS = ("email", "ipv4", "ipv6", "phone")

RESERVED_DOMAIN = exception_pattern("domains", r"(?:^|\.)(?:{})$")
NOBODY = exception_pattern("users", "^(?:{})$")
NOT_A_DOMAIN = exception_pattern("endings", r"\.(?:{})$")
DNS_RESOLVERS = frozenset(map(ipaddress.ip_address, rule_tables()["exceptions"]["dns_resolvers"]))


def rules_of(
    kinds: tuple[str, ...], internal_hosts: tuple[str, ...], employee_ids: tuple[str, ...]
) -> list[SecretRule]:
    """The rules for these kinds, host suffixes (".corp.acme.com") and employee-number patterns (RE2)."""
    known = {rule.kind: rule for rule in written_rules("pii")}
    made = [known[kind] for kind in kinds]
    for suffix in internal_hosts:
        tail = re.escape(suffix.lstrip("."))
        pattern = rf"(?i)\b([a-z0-9](?:[a-z0-9\-]{{0,62}}\.)+{tail})\b"
        made.append(SecretRule("host", pattern, pattern, (suffix.lstrip(".").lower(),), check="none"))
    for written in employee_ids:
        made.append(SecretRule("employee-id", f"({written})", f"(?:{written})", ("",), check="none"))
    return made


def rejection_of_pii(kind: str, value: str, before: str) -> str:
    """Why a match is not personal data; "" if it may be."""
    if kind == "email":
        name, _, domain = value.rpartition("@")
        if RESERVED_DOMAIN.search(domain) or NOT_A_DOMAIN.search(domain):
            return "a reserved or impossible domain"
        return "no one's name" if NOBODY.match(name) else ""
    if kind in ("ipv4", "ipv6"):
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            return "not an address"
        if not address.is_global or address.is_multicast or address in DNS_RESOLVERS:
            return "reserved, private or a public resolver"
        if kind == "ipv4" and (max(address.packed) < 32 or address.packed[3] == 0 or address.packed[0] < 5):
            return "reads like a version or a network"
        if re.search(r"(?i)version|oid|\bv$|release|section|rfc", before):
            return "a version"
        return ""
    if kind == "phone":
        digits = re.sub(r"\D", "", value)
        if "5550" in digits or not 9 <= len(digits) <= 15 or len(set(digits)) < 4:
            return "a fictional or impossible number"
    return ""
