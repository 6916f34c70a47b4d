"""Damage a stored file or object."""

from __future__ import annotations

from pathlib import Path

from lakh import storage

__all__ = ["flip_bit"]


def flip_bit(url: str | Path, at: int) -> None:
    """Invert one bit of the byte at `at`, counted from the end if negative."""
    content = bytearray(storage.read_bytes(url))
    content[at] ^= 1
    storage.write_bytes(url, bytes(content))
