"""Long lists of equal rows in little space: many tuples over a few objects, such as all combinations of some words.

Such a result can have 100 million items, which as JSON would be a gigabyte and in memory ten. The form has each
distinct object once, and one byte per item, compressed:

    ["p", list or tuple of rows ("l", "t"), kind of a row, width, [objects], bytes as hex]

Objects are told apart by identity, so that 1, 1.0 and True stay what they are. A decoded form has at most MOST_ITEMS
items, whatever its bytes claim.
"""

from __future__ import annotations

from typing import Any

LEAST_ROWS = 4096
MOST_OBJECTS = 64
MOST_ITEMS = 1 << 28
_KINDS: dict[str, Any] = {"l": list, "t": tuple}
_SCALARS = (type(None), bool, float, str)  # and int, which has another form if it is long


def pack(value: Any) -> list[Any] | None:
    """The form of a list or tuple; None if it has another shape."""
    if len(value) < LEAST_ROWS or type(value[0]) not in (list, tuple) or not value[0]:
        return None
    kind, width = type(value[0]), len(value[0])
    codes: dict[int, bytes] = {}
    objects: list[Any] = []
    found = bytearray()
    for row in value:
        if type(row) is not kind or len(row) != width:
            return None
        try:
            found += b"".join(map(codes.__getitem__, map(id, row)))
        except KeyError:
            for item in row:
                if id(item) not in codes:
                    if len(objects) == MOST_OBJECTS or not _is_scalar(item):
                        return None
                    codes[id(item)] = bytes([len(objects)])
                    objects.append(item)
            found += b"".join(map(codes.__getitem__, map(id, row)))
    if len(found) > MOST_ITEMS:
        return None
    import zlib  # memory that few programs need

    return ["p", _tag(type(value)), _tag(kind), width, objects, zlib.compress(found, 1).hex()]


def unpack(outer: str, inner: str, width: int, objects: list[Any], packed: str) -> Any:
    """The rows of a form; ValueError, KeyError or another error of wrong data for what `pack` does not make."""
    import zlib

    if type(width) is not int or width < 1 or not all(_is_scalar(item) for item in objects):
        raise ValueError("not packed rows")
    decompressor = zlib.decompressobj()
    codes = decompressor.decompress(bytes.fromhex(packed), MOST_ITEMS + 1)
    if len(codes) > MOST_ITEMS or len(codes) % width or not decompressor.eof:
        raise ValueError("not packed rows")
    kind = _KINDS[inner]
    rows = (kind(map(objects.__getitem__, codes[at : at + width])) for at in range(0, len(codes), width))
    return _KINDS[outer](rows)


def _is_scalar(item: Any) -> bool:
    return type(item) in _SCALARS or (type(item) is int and item.bit_length() < 64)


def _tag(kind: type) -> str:
    return "l" if kind is list else "t"
