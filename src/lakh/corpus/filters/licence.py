"""Drop documents whose licence is not accepted.

Licences fall into five classes: permissive, own (sources given as own:SRC), copyleft, none (nothing is known) and
unknown (something is stated that is not a known licence). The settings name the accepted classes. A licence notice at
the top of a file takes precedence over the licence of its repository: files keep their authors' terms wherever they are
copied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lakh.corpus.document import Filter, drop_for, rows_of, with_columns
from lakh.corpus.licences.detect import HEAD_BYTES, OWN, UNKNOWN, header_licence
from lakh.corpus.licences.expressions import TABLES, classify_expression
from lakh.errors import ConfigError

__all__ = ["LicenceSettings", "class_of", "licence_filter"]

LicenceClass = Literal["permissive", "own", "copyleft", "none", "unknown"]
COPYLEFT = re.compile(rf"\b({'|'.join(TABLES['copyleft'])})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class LicenceSettings:
    """Accepted licences."""

    take: tuple[str, ...] = ("permissive", "own")
    """Accepted classes of licences: permissive, own (code given as own:SRC), copyleft, none (nothing is known), unknown
    (not recognised)."""
    also: tuple[str, ...] = ()
    """SPDX identifiers to accept whatever their class."""
    headers: bool = True
    """Whether a licence notice at the top of a file takes precedence over the licence of its repository."""
    opt_out: str = ""
    """A file of opt-out requests; see lakh.corpus.filters.opt_out."""

    def __post_init__(self) -> None:
        known = get_args(LicenceClass)
        for name in self.take:
            if name not in known:
                raise ConfigError("take", f"{name!r} is not a class of licences", f"choose from: {', '.join(known)}")


def class_of(expression: str) -> LicenceClass:
    """The class of an SPDX expression."""
    if not expression:
        return "none"
    if expression == OWN:
        return "own"
    if classify_expression(expression).permissive:
        return "permissive"
    return "copyleft" if COPYLEFT.search(expression) and UNKNOWN not in expression else "unknown"


def licence_filter(settings: LicenceSettings) -> Filter:
    """Set `licence` from file headers, and drop the documents whose licence is not accepted (reason licence)."""

    def apply(batch: Any) -> Any:
        texts = batch.column("text")
        licences, evidence = batch.column("licence").to_pylist(), batch.column("licence_evidence").to_pylist()
        details = [""] * len(licences)
        for row, (reason,) in enumerate(rows_of(batch, "reason")):
            if reason:
                continue
            if settings.headers:
                found = header_licence(texts[row].as_buffer()[:HEAD_BYTES].to_pybytes())
                if found.expression:
                    licences[row], evidence[row] = found.expression, found.evidence
            licence, name = licences[row], class_of(licences[row])
            if name not in settings.take and licence not in settings.also:
                details[row] = f"{licence or 'none'} is {name} ({evidence[row] or 'metadata'})"
        return drop_for(with_columns(batch, licence=licences, licence_evidence=evidence), "licence", details)

    return apply
