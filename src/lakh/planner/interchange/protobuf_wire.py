"""The wire format of Protocol Buffers, for messages with a handful of fields: no generated code, no dependency.

A message is a sequence of fields; a field is a key (number x 8 + wire type) and a value. Wire types: 0 varint, 1 eight
bytes, 2 length and bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from lakh.errors import DataError

__all__ = ["bytes_field", "fields_of", "signed", "varint", "varint_field", "varints_of"]

VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5
MOST_VARINT_BYTES = 10


def varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; a negative number as its 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | LENGTH) + varint(len(data)) + data


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for count in range(MOST_VARINT_BYTES):
        if at + count >= len(data):
            break
        value |= (data[at + count] & 0x7F) << 7 * count
        if data[at + count] < 0x80:
            return value & (1 << 64) - 1, at + count + 1
    raise DataError("a protobuf message", "ends inside a number", "write the file again")


def signed(value: int) -> int:
    """A varint as a signed 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


def varints_of(value: int | bytes) -> Iterator[int]:
    """Of a repeated number: packed into one field, or one of several fields."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = read_varint(value, at)
        yield number


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: a varint as an unsigned integer, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
            yield number, value
            continue
        if kind == LENGTH:
            size, at = read_varint(data, at)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = struct.calcsize("<d" if kind == EIGHT_BYTES else "<f")
        else:
            raise DataError("a protobuf message", f"has wire type {kind}", "write the file again")
        if at + size > len(data):
            raise DataError("a protobuf message", "ends inside a field", "write the file again")
        yield number, data[at : at + size]
        at += size
