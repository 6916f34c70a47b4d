"""Personal and internal data: e-mail addresses, public IP addresses, phone numbers, internal hosts, employee numbers.

Internal hosts and employee numbers are patterns from the settings. Reserved addresses (example.com, RFC 5737, private
networks, git@host) identify nobody and stay.
"""

from __future__ import annotations

import ipaddress
import re

from lakh.corpus.secrets.rules import SecretRule

__all__ = ["PII_KINDS", "rejection_of_pii", "rules_of"]

PII_KINDS = ("email", "ipv4", "ipv6", "phone")

EMAIL = r"\b([A-Za-z0-9][\w.+\-]{0,63}@[A-Za-z0-9\-]{1,63}(?:\.[A-Za-z0-9\-]{1,63}){0,4}\.[A-Za-z]{2,18})\b"
IPV4 = r"(?:^|[^\w.\-])((?:[0-9]{1,3}\.){3}[0-9]{1,3})(?:$|[^\w.\-]|\.(?:$|[^\w]))"
IPV6 = r"(?:^|[^\w:.])([0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4}){7}|(?:[0-9A-Fa-f]{1,4}:){2,6}:[0-9A-Fa-f:]{1,20})(?:$|[^\w:.])"  # noqa: E501
PHONE = (
    r"(?:^|[^\w+./\-])(\+[1-9][0-9]{0,2}[ .\-]\(?[0-9]{1,4}\)?(?:[ .\-][0-9]{2,8}){1,4}"
    r"|\([2-9][0-9]{2}\) ?[2-9][0-9]{2}[\-. ][0-9]{4})(?:$|[^\w./\-])"
)
HINTS = {"email": ("@",), "ipv4": (".",), "ipv6": (":",), "phone": ("+", "(")}
PATTERNS = {"email": EMAIL, "ipv4": IPV4, "ipv6": IPV6, "phone": PHONE}
# For hyperscan: what surrounds a literal or a digit; the full patterns take ten times as long.
QUICK: dict[str, str | tuple[str, ...]] = {
    "email": r"@[A-Za-z0-9\-]{1,63}\.[A-Za-z0-9]",
    "ipv4": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]",
    "ipv6": r"[0-9A-Fa-f]:[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]{0,4}:",
    "phone": (r"\+[1-9][0-9]{0,2}[ .\-]\(?[0-9]", r"\([2-9][0-9]{2}\) ?[2-9][0-9]{2}[\-. ]"),
}

RESERVED_DOMAIN = re.compile(
    r"(?i)(?:^|\.)(?:example\.(?:com|org|net|edu)|example|invalid|localhost|test|local|domain\.(?:com|tld)|email\.com"
    r"|users\.noreply\.github\.com|foo\.com|bar\.com|yourdomain\.com)$"
)
NOBODY = re.compile(
    r"(?i)^(?:git|noreply|no-reply|user|username|you|your[\w.]*|name|me|someone|nobody|test|foo|bar|redacted)$"
)
NOT_A_DOMAIN = re.compile(r"(?i)\.(?:py|js|ts|go|rs|java|json|png|jpg|svg|html|md|yml|yaml|x|so|o|a|service|mount)$")


def rules_of(
    kinds: tuple[str, ...], internal_hosts: tuple[str, ...], employee_ids: tuple[str, ...]
) -> list[SecretRule]:
    """The rules for these kinds, host suffixes (".corp.acme.com") and employee-number patterns (RE2)."""
    made = [SecretRule(kind, PATTERNS[kind], QUICK[kind], HINTS[kind]) for kind in kinds]
    for suffix in internal_hosts:
        tail = re.escape(suffix.lstrip("."))
        pattern = rf"(?i)\b([a-z0-9](?:[a-z0-9\-]{{0,62}}\.)+{tail})\b"
        made.append(SecretRule("host", pattern, pattern, (suffix.lstrip(".").lower(),), checked=False))
    for written in employee_ids:
        made.append(SecretRule("employee-id", f"({written})", f"(?:{written})", ("",), checked=False))
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


DNS_RESOLVERS = {
    ipaddress.ip_address(text)
    for text in ("8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9", "2001:4860:4860::8888", "2606:4700:4700::1111")
}
