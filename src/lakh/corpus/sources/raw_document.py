"""A document before any check: bytes with a repository and path, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RawDocument", "ReadPredicate"]

ReadPredicate = Callable[[str, int], bool]
"""(path, size in bytes) -> whether to read the content."""


@dataclass(slots=True)
class RawDocument:
    repo: str
    path: str
    size_bytes: int = 0
    content: bytes | None = None
    """None if it was not read; `reason`, or its name and size, explain why."""
    licence: str = ""
    licence_evidence: str = ""
    provenance: str = ""
    language: str = ""
    """If the source states it; else it is detected."""
    documentation: bool = False
    reason: str = ""
    detail: str = ""
