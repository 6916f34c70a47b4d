"""A document before it is looked at: bytes with a place, or a place with the reason why there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RawDocument", "ReadPredicate"]

ReadPredicate = Callable[[str, int], bool]
"""(path, size in bytes) -> is it worth reading?"""


@dataclass(slots=True)
class RawDocument:
    repo: str
    path: str
    size_bytes: int = 0
    content: bytes | None = None
    """None where it was not read: `reason` says why, or its name and size will."""
    licence: str = ""
    licence_evidence: str = ""
    provenance: str = ""
    language: str = ""
    """Where the source knows it; else the name and content decide."""
    documentation: bool = False
    reason: str = ""
    detail: str = ""
