"""One rank's execution trace in the format of MLCommons Chakra: a graph of computation and communication.

A file is a sequence of messages, each with its length before it: global metadata first, then the nodes. Field numbers
and names of attributes are those of et_def.proto and of Chakra's feeder (github.com/mlcommons/chakra, schema 0.0.4).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from lakh import storage
from lakh.errors import DataError
from lakh.planner.interchange.protobuf_wire import (
    bytes_field,
    fields_of,
    read_varint,
    signed,
    varint,
    varint_field,
    varints_of,
)

__all__ = ["COLLECTIVE_TYPES", "NODE_TYPES", "TraceNode", "encode_trace", "read_trace"]

AttributeValue: TypeAlias = bool | int | float | str

SCHEMA = "0.0.4"
NODE_TYPES = ("invalid", "metadata", "memory load", "memory store", "compute", "send", "receive", "collective")
"""By number."""
COLLECTIVE_TYPES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter_block", "barrier",
)  # fmt: skip
"""By the number in the attribute comm_type."""

# Fields of a node.
_ID, _NAME, _TYPE, _CONTROL, _DATA, _START, _DURATION, _ATTRIBUTE = 1, 2, 3, 4, 5, 6, 7, 10
# Fields of an attribute: its name, and the type of its value.
_ATTRIBUTE_NAME, _INT32, _INT64, _UINT64, _BOOL, _STRING = 1, 7, 9, 13, 27, 29
_FIELD_OF = {
    "is_cpu_op": _BOOL, "num_ops": _INT64, "tensor_size": _UINT64, "comm_type": _INT64, "comm_size": _INT64,
    "comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32, "comm_priority": _INT32, "pg_name": _STRING,
}  # fmt: skip
"""The types that Chakra's feeder expects."""


def _zigzag(value: int) -> int:
    return value >> 1 ^ -(value & 1)


_OF_VARINT: dict[int, Callable[[int], AttributeValue]] = {
    7: signed, 9: signed, 11: int, 13: int, 15: _zigzag, 17: _zigzag, 27: bool,
}  # fmt: skip
_OF_BYTES = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}


@dataclass(frozen=True, slots=True)
class TraceNode:
    id: int
    name: str
    type: str
    """One of NODE_TYPES."""
    depends_on: tuple[int, ...] = ()
    """Control and data dependencies."""
    duration_us: int = 0
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    """Scalars; lists of a trace are not read."""

    @property
    def collective(self) -> str:
        return COLLECTIVE_TYPES[self.integer("comm_type")]

    def integer(self, name: str) -> int:
        value = self.attributes.get(name, 0)
        return int(value)


def encode_trace(nodes: Iterable[TraceNode]) -> bytes:
    """A trace as the bytes of a file."""
    return b"".join(varint(len(message)) + message for message in (bytes_field(1, SCHEMA), *map(_encode_node, nodes)))


def _encode_node(node: TraceNode) -> bytes:
    parts = [varint_field(_ID, node.id), bytes_field(_NAME, node.name)]
    parts.append(varint_field(_TYPE, NODE_TYPES.index(node.type)))
    if node.depends_on:
        parts.append(bytes_field(_DATA, b"".join(map(varint, node.depends_on))))
    if node.duration_us:
        parts.append(varint_field(_DURATION, node.duration_us))
    parts += [bytes_field(_ATTRIBUTE, _encode_attribute(name, value)) for name, value in node.attributes.items()]
    return b"".join(parts)


def _encode_attribute(name: str, value: AttributeValue) -> bytes:
    number = _FIELD_OF[name]
    encoded = bytes_field(number, str(value)) if number == _STRING else varint_field(number, int(value))
    return bytes_field(_ATTRIBUTE_NAME, name) + encoded


def read_trace(path: str | Path) -> list[TraceNode]:
    """Nodes of a trace file, plain or compressed with gzip."""
    data = storage.read_bytes(path)
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return _decode_trace(data)
    except (DataError, EOFError, OSError, zlib.error, UnicodeDecodeError, IndexError, TypeError) as error:
        reason = error.found if isinstance(error, DataError) else str(error)
        raise DataError(str(path), f"is no Chakra trace ({reason})", "give files that end in .et") from None


def _decode_trace(data: bytes) -> list[TraceNode]:
    nodes, at, is_metadata = [], 0, True
    while at < len(data):
        size, at = read_varint(data, at)
        if at + size > len(data):
            raise DataError("the file", "ends inside a message", "")
        if not is_metadata:
            nodes.append(_decode_node(data[at : at + size]))
        is_metadata, at = False, at + size
    if is_metadata:
        raise DataError("the file", "is empty", "")
    return nodes


def _decode_node(data: bytes) -> TraceNode:
    numbers = {_ID: 0, _TYPE: 0, _DURATION: 0}
    name = ""
    depends_on: list[int] = []
    attributes: dict[str, AttributeValue] = {}
    for number, value in fields_of(data):
        if number in numbers:
            numbers[number] = _integer(value)
        elif number == _NAME:
            name = _bytes(value).decode()
        elif number in (_CONTROL, _DATA):
            depends_on += varints_of(value)
        elif number == _ATTRIBUTE:
            attributes |= _decode_attribute(_bytes(value))
    return TraceNode(
        numbers[_ID], name, NODE_TYPES[numbers[_TYPE]], tuple(depends_on), numbers[_DURATION], attributes
    )  # fmt: skip


def _decode_attribute(data: bytes) -> dict[str, AttributeValue]:
    name, found = "", {}
    for number, value in fields_of(data):
        if number == _ATTRIBUTE_NAME:
            name = _bytes(value).decode()
        elif number in _OF_VARINT:
            found[number] = _OF_VARINT[number](_integer(value))
        elif number in _OF_BYTES:
            found[number] = struct.unpack(_OF_BYTES[number], _bytes(value))[0]
        elif number == _STRING:
            found[number] = _bytes(value).decode()
    return {name: next(iter(found.values()))} if found else {}


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise DataError("a field", "has bytes instead of a number", "")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise DataError("a field", "has a number instead of bytes", "")
    return value
