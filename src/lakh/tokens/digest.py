"""A hash of the stream that does not depend on who read which part of it.

Each row is hashed with its position (SHA-256); the hashes are added up modulo 2**256. Addition has no order, so ranks
add what they read, in any number and after any restart, and the sum is the same as long as every position was read
once with the same tokens. Cost: about 1 ms for a million bytes of tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

__all__ = ["StreamDigest", "digest_rows"]

MODULUS = 1 << 256


@dataclass(frozen=True)
class StreamDigest:
    """Of `rows` rows. Add two of them to have both."""

    rows: int = 0
    total: int = 0

    def __add__(self, other: StreamDigest) -> StreamDigest:
        return StreamDigest(self.rows + other.rows, (self.total + other.total) % MODULUS)

    @property
    def sha256(self) -> str:
        """What is printed."""
        return hashlib.sha256(f"{self.rows}:{self.total:064x}".encode()).hexdigest()

    def to_bytes(self) -> bytes:
        return self.rows.to_bytes(8, "little") + self.total.to_bytes(32, "little")

    @staticmethod
    def from_bytes(raw: bytes) -> StreamDigest:
        return StreamDigest(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:40], "little"))


def digest_rows(first_position: int, tokens: np.ndarray, lengths: np.ndarray) -> StreamDigest:
    """Of consecutive rows; the padding of a row does not count."""
    total = 0
    for number, (row, length) in enumerate(zip(tokens, lengths.tolist(), strict=True)):
        raw = (first_position + number).to_bytes(8, "little") + np.ascontiguousarray(row[:length], "<i4").tobytes()
        total += int.from_bytes(hashlib.sha256(raw).digest(), "little")
    return StreamDigest(len(tokens), total % MODULUS)
