"""A small tokenizer.model of SentencePiece, written field by field."""

from __future__ import annotations

import struct
from typing import Any


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = b""
    while value >= 0x80:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "ab", "▁ab", "▁a", "ba", "▁▁", "▁<PRE>", "▁<SUF>", "▁<MID>"]
SCORES = [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0, 0.0, 0.0]


def message(trainer: dict[int, Any] | None = None, normalizer: dict[int, Any] | None = None) -> bytes:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(piece, 0.0, 6) for piece in BYTES] + [
        (piece, score, 1) for piece, score in zip(PIECES, SCORES, strict=True)
    ]
    whole = b"".join(
        field(1, field(1, piece.encode()) + field(2, score) + (field(3, kind) if kind != 1 else b""))
        for piece, score, kind in pieces
    )
    settings = (
        {3: 2, 35: 1, 40: 0, 41: 1, 42: 2, 43: -1, **(trainer or {})},
        {1: b"identity", 3: 1, 4: 0, **(normalizer or {})},
    )
    return whole + b"".join(
        field(number, b"".join(field(key, value) for key, value in part.items()))
        for number, part in zip((2, 3), settings, strict=True)
    )
